"""Host memory for swapped-out KV: one buffer, cut into slots of one size."""

from __future__ import annotations

import contextlib
import heapq
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

#: Slots start at multiples of this many bytes, so that a view of any dtype is aligned.
SLOT_ALIGNMENT = 256


class PoolExhaustedError(MemoryError):
    """More slots were asked for than are free; nothing was allocated."""


class SlotAllocator:
    """Hands out slot numbers; knows nothing of the memory behind them.

    A scheduler can run one of these for pools in other processes, all of which then use the same
    numbers. Not thread-safe: one owner calls it.

    Attributes:
        num_slots: Slots in all, > 0; they are numbered from 0.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"'num_slots' must be >= 1 (got {num_slots}).")
        self.num_slots = num_slots
        # A heap: low numbers first keeps the slots of one allocation next to each other, and
        # neighbours are copied in one piece.
        self._free = list(range(num_slots))
        self._is_used = bytearray(num_slots)

    @property
    def num_free_slots(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    def allocate(self, num_slots: int) -> list[int]:
        """Take the lowest ``num_slots`` free slots, in order; all or none.

        Raises:
            PoolExhaustedError: Fewer are free.
            ValueError: The number is negative.
        """
        if num_slots < 0:
            raise ValueError(f"'num_slots' must be >= 0 (got {num_slots}).")
        if num_slots > len(self._free):
            raise PoolExhaustedError(
                f"{num_slots} host slots are needed and {len(self._free)} of {self.num_slots} are "
                "free; free some, or raise the pool's byte limit."
            )
        slots = [heapq.heappop(self._free) for _ in range(num_slots)]
        for slot in slots:
            self._is_used[slot] = True
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back; the order does not matter. All are checked before any is freed.

        Raises:
            ValueError: A slot does not exist, is not allocated or is named twice. Nothing changes.
        """
        returned = list(slots)
        for slot in returned:
            self._check_used(slot)
        if len(set(returned)) < len(returned):
            twice = sorted({slot for slot in returned if returned.count(slot) > 1})
            raise ValueError(f"Each slot must be freed once (got {twice} more than once).")
        for slot in returned:
            self._is_used[slot] = False
            heapq.heappush(self._free, slot)

    def is_allocated(self, slot: int) -> bool:
        """Whether the slot is in use; False for a number that does not exist."""
        return 0 <= slot < self.num_slots and bool(self._is_used[slot])

    def check_integrity(self) -> None:
        """Assert that each slot is either free, once, or in use."""
        num_used = sum(self._is_used)
        assert len(self._free) + num_used == self.num_slots, (
            f"{len(self._free)} free + {num_used} used != {self.num_slots} slots"
        )
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        wrong = [slot for slot in self._free if self._is_used[slot]]
        assert not wrong, f"slots {wrong} are free and in use"

    def _check_used(self, slot: int) -> None:
        if not self.is_allocated(slot):
            state = "already free" if 0 <= slot < self.num_slots else "not one of the pool's"
            raise ValueError(
                f"A slot must be allocated (got {slot}, which is {state}; the pool has slots 0 to "
                f"{self.num_slots - 1})."
            )


class HostPool(SlotAllocator):
    """Slots with memory: one uint8 buffer, page-locked where there is a CUDA device.

    The buffer is taken once, when the pool is built, and never grows: page-locking is slow, and a
    fixed limit keeps the host from swapping. It is page-locked in place: what PyTorch allocates
    page-locked is rounded up to a power of two, to twice the limit at worst.

    Attributes:
        slot_bytes: Size of a slot, rounded up to a multiple of ``SLOT_ALIGNMENT``.
        is_pinned: Whether copies to and from a device can run asynchronously.
    """

    def __init__(self, slot_bytes: int, limit_bytes: int, *, pin: bool | None = None) -> None:
        """Allocate as many slots as fit.

        Args:
            slot_bytes: Bytes one slot must hold, > 0.
            limit_bytes: Most bytes the pool may take, at least one slot.
            pin: Page-lock the memory; None does so where CUDA is available.

        Raises:
            ValueError: A number breaks its rule, or ``pin`` is asked for without CUDA.
            RuntimeError: The memory cannot be page-locked.
        """
        if slot_bytes < 1:
            raise ValueError(f"'slot_bytes' must be >= 1 (got {slot_bytes}).")
        has_cuda = torch.cuda.is_available()
        if pin and not has_cuda:
            raise ValueError("'pin' must be None or False where CUDA is not available (got True).")
        aligned = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if limit_bytes < aligned:
            raise ValueError(
                f"'limit_bytes' must hold one slot of {aligned} bytes (got {limit_bytes}); raise "
                "the limit or use smaller slots."
            )
        super().__init__(limit_bytes // aligned)
        self.slot_bytes = aligned
        self.is_pinned = has_cuda if pin is None else pin
        self._memory = torch.empty(self.num_slots, aligned, dtype=torch.uint8)
        self._unlock: weakref.finalize[..., HostPool] | None = None
        if self.is_pinned:
            _page_lock(self._memory)
            # At the latest with the pool: memory must not be given back while it is locked.
            self._unlock = weakref.finalize(self, _page_unlock, self._memory)
            self._unlock.atexit = False  # the end of the process unlocks it, after CUDA has gone

    def close(self) -> None:
        """Unlock the memory; no copy may be under way."""
        if self._unlock is not None:
            self._unlock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer, at most the limit."""
        return self.num_slots * self.slot_bytes

    def view(self, slot: int) -> torch.Tensor:
        """Return the ``[slot_bytes]`` uint8 memory of an allocated slot, not initialized.

        The caller may write to it until the slot is freed; the pool does not see later use.

        Raises:
            ValueError: The slot is not allocated.
        """
        self._check_used(slot)
        return self._memory[slot]

    def runs(self, slots: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the memory of `slots`, in order, with neighbours in one ``[bytes]`` piece.

        For workers, whose slots a scheduler has allocated: whether they are is not checked.
        """
        start = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1:
                yield self._memory[slots[start] : slots[index - 1] + 1].flatten()
                start = index


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _page_lock(memory: torch.Tensor) -> None:
    error = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error.value:
        _forget_error()
        raise RuntimeError(f"{memory.nbytes} bytes cannot be page-locked: {error}")


def _page_unlock(memory: torch.Tensor) -> None:
    if _cudart().cudaHostUnregister(memory.data_ptr()).value:
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps the error of a call, and PyTorch raises it after the next kernel: have it here."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
