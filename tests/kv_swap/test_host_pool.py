"""Slots are handed out once, given back once, and stay within the byte limit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

torch = pytest.importorskip("torch", reason="needs torch")

from sola_sched.kv_swap import host_pool, worker  # noqa: E402
from sola_sched.kv_swap.host_pool import (  # noqa: E402  after the check for torch
    SLOT_ALIGNMENT,
    HostPool,
    PoolExhaustedError,
    SlotAllocator,
)

NUM_SLOTS = 7


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations and frees, against the set of slots each caller holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(100, NUM_SLOTS * SLOT_ALIGNMENT, pin=False)
        self.held: list[int] = []

    @rule(num_slots=st.integers(0, NUM_SLOTS + 1))
    def allocate(self, num_slots: int) -> None:
        if num_slots > NUM_SLOTS - len(self.held):
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(num_slots)
            return
        slots = self.pool.allocate(num_slots)
        assert len(slots) == num_slots
        assert set(slots).isdisjoint(self.held)
        for slot in slots:
            self.pool.view(slot).fill_(slot + 1)
        self.held += slots

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.free(slots)
        self.held = [slot for slot in self.held if slot not in slots]

    @rule(slot=st.integers(-2, NUM_SLOTS + 1))
    def free_what_is_not_held(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(ValueError, match="must be allocated"):
                self.pool.free([*self.held, slot])

    @invariant()
    def slots_are_conserved_and_keep_their_content(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free_slots == NUM_SLOTS - len(self.held)
        for slot in self.held:
            assert bool((self.pool.view(slot) == slot + 1).all())


AllocatorMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True
)
TestAllocator = AllocatorMachine.TestCase


def test_pool_stays_within_its_byte_limit() -> None:
    pool = HostPool(300, 2000, pin=False)

    assert (pool.slot_bytes, pool.num_slots, pool.num_bytes) == (512, 3, 1536)


def test_slots_are_aligned_for_any_dtype() -> None:
    pool = HostPool(1, 10 * SLOT_ALIGNMENT, pin=False)

    offsets = {pool.view(slot).storage_offset() % SLOT_ALIGNMENT for slot in pool.allocate(10)}

    assert offsets == {0}


def test_exhaustion_shows_both_sides_and_takes_nothing() -> None:
    allocator = SlotAllocator(4)
    allocator.allocate(1)

    with pytest.raises(PoolExhaustedError, match=r"4 host slots are needed and 3 of 4 are free"):
        allocator.allocate(4)

    assert allocator.num_free_slots == 3


def test_second_free_is_refused_and_frees_nothing() -> None:
    allocator = SlotAllocator(4)
    first, second = allocator.allocate(2)
    allocator.free([first])

    with pytest.raises(ValueError, match=f"got {first}, which is already free"):
        allocator.free([second, first])

    assert allocator.is_allocated(second)
    allocator.check_integrity()


def test_slot_named_twice_in_one_call_is_refused() -> None:
    allocator = SlotAllocator(4)
    (slot,) = allocator.allocate(1)

    with pytest.raises(ValueError, match="freed once"):
        allocator.free([slot, slot])

    assert allocator.is_allocated(slot)


def test_view_of_a_free_slot_is_refused() -> None:
    pool = HostPool(8, 1024, pin=False)

    with pytest.raises(ValueError, match="already free"):
        pool.view(0)


@pytest.mark.parametrize(
    ("slot_bytes", "limit_bytes", "message"),
    [(0, 1024, "'slot_bytes' must be >= 1"), (512, 511, "must hold one slot of 512 bytes")],
)
def test_sizes_are_checked(slot_bytes: int, limit_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostPool(slot_bytes, limit_bytes)


def test_integrity_check_notices_a_lost_slot() -> None:
    allocator = SlotAllocator(4)
    allocator._free.pop()

    with pytest.raises(AssertionError, match="3 free"):
        allocator.check_integrity()


def test_pinning_needs_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")

    with pytest.raises(ValueError, match="'pin' must be"):
        HostPool(8, 1024, pin=True)


class FakeCudart:
    """Page-locks nothing, and remembers what it was asked to."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> Any:
        if not self.error:
            self.locked[pointer] = num_bytes
        return SimpleNamespace(value=self.error)

    def cudaHostUnregister(self, pointer: int) -> Any:
        del self.locked[pointer]
        return SimpleNamespace(value=0)


@pytest.fixture
def cudart(monkeypatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_just_the_pools_memory_is_page_locked_until_it_is_closed(cudart) -> None:
    """PyTorch's own page-locked memory comes in powers of two."""
    pool = HostPool(100, 5 * SLOT_ALIGNMENT + 7)

    assert pool.is_pinned
    assert list(cudart.locked.values()) == [5 * SLOT_ALIGNMENT]
    assert pool.view(pool.allocate(1)[0]).data_ptr() in cudart.locked
    pool.close()
    assert cudart.locked == {}
    pool.close()  # unlocks nothing twice


def test_a_pool_that_nobody_has_closed_unlocks_its_memory_before_it_goes(cudart) -> None:
    pool = HostPool(100, SLOT_ALIGNMENT)
    assert cudart.locked
    del pool
    assert cudart.locked == {}


def test_without_page_locked_memory_nothing_is_swapped_and_cuda_goes_on(
    cudart, monkeypatch
) -> None:
    forgotten: list[bool] = []
    warnings: list[str] = []
    monkeypatch.setattr(host_pool, "_forget_error", lambda: forgotten.append(True))
    monkeypatch.setattr(
        logging.getLogger("vllm.sola_sched"), "warning", lambda text, *args: warnings.append(text)
    )
    cudart.error = 2

    assert worker._pool(100, 10 * SLOT_ALIGNMENT, 1) is None
    assert forgotten == [True]
    assert len(warnings) == 1


@pytest.mark.gpu
def test_memory_is_pinned_on_a_gpu_machine() -> None:
    pool = HostPool(8, 1024)

    assert pool.is_pinned
    assert pool.view(pool.allocate(1)[0]).is_pinned()
