"""One pool of KV blocks for services whose blocks have different sizes: merged blocks.

A block of a service holds the KV of some tokens in all layers and heads, so its bytes depend on the
model. The pool is cut into *merged blocks* of one size for all. Each belongs to one service at a
time and holds as many of its blocks as fit; when the last of them is freed, any service may have
it. An entry of a request's block table is a pair: the merged block, and the place in it.

Source: SeaLLM (Zhao et al.), section 4.4, "merged method", and Figure 5(c). The paper does not say
how long a merged block is, nor which of those begun takes the next block: here it is the shortest
that wastes little for every service, and the fullest that has room, so that others run empty.

This is the bookkeeping. vLLM's kernels want a pool of equal blocks for each model: engines on GPUs
share memory through kvcached, see `elastic_kv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import ConfigError

#: A block table: [num_blocks, 2], merged block and place in it.
BlockTable = NDArray[np.int32]
#: Merged blocks are at most so many of the largest service's blocks long.
_MOST_BLOCKS = 16


def merged_block_bytes(block_bytes: Iterable[int], max_waste: float = 0.05) -> int:
    """The shortest merged block of which no service leaves more than a share unused.

    It is a multiple of the largest service's block.

    Args:
        block_bytes: Bytes of a block of each service.
        max_waste: That share, in [0, 1). If 16 of those blocks do not suffice, the length up to
            there with the least waste is taken.
    """
    sizes = sorted(set(block_bytes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"Every service's block must have at least 1 byte (got {sizes}).")
    lengths = [count * sizes[-1] for count in range(1, _MOST_BLOCKS + 1)]
    wastes = [max(length % size / length for size in sizes) for length in lengths]
    for length, waste in zip(lengths, wastes, strict=True):
        if waste <= max_waste:
            return length
    return lengths[wastes.index(min(wastes))]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What a pool's bytes are used for.

    Attributes:
        total: All of it.
        held: Of merged blocks that belong to a service.
        used: Of blocks that were given out.
    """

    total: int
    held: int
    used: int

    @property
    def fragmentation(self) -> float:
        """Share of the held bytes that nobody uses; 0 while nothing is held."""
        return 1.0 - self.used / self.held if self.held else 0.0


class MergedPool:
    """The allocator.

    Args:
        total_bytes: Of the memory to be shared.
        block_bytes: Bytes of a block of each service, by name.
        merged_bytes: Length of a merged block; None for `merged_block_bytes`.

    Raises:
        ConfigError: A service's block does not fit into a merged one, or none fits into the pool.
    """

    def __init__(
        self, total_bytes: int, block_bytes: Mapping[str, int], merged_bytes: int | None = None
    ) -> None:
        length = merged_block_bytes(block_bytes.values()) if merged_bytes is None else merged_bytes
        for name, size in block_bytes.items():
            if not 0 < size <= length:
                raise ConfigError(
                    f"A block of every service must fit into a merged block of {length} bytes "
                    f"({name!r} has {size}); make merged blocks longer."
                )
        if total_bytes < length:
            raise ConfigError(
                f"The pool must hold a merged block of {length} bytes (got {total_bytes})."
            )
        self.merged_bytes = length
        self.num_merged = total_bytes // length
        self._block_bytes = dict(block_bytes)
        self._places = {name: length // size for name, size in block_bytes.items()}
        self._free = list(range(self.num_merged - 1, -1, -1))
        self._owner: list[str | None] = [None] * self.num_merged
        self._free_places: list[list[int]] = [[] for _ in range(self.num_merged)]
        # Begun merged blocks of a service by the number of free places; in order of entry.
        self._begun: dict[str, list[dict[int, None]]] = {
            name: [{} for _ in range(count + 1)] for name, count in self._places.items()
        }
        self._num_used = dict.fromkeys(block_bytes, 0)

    def places(self, service: str) -> int:
        """Blocks of the service in one merged block."""
        return self._places[service]

    def num_free(self, service: str) -> int:
        """Blocks that the service could be given now."""
        begun = sum(n * len(found) for n, found in enumerate(self._begun[service]))
        return begun + len(self._free) * self._places[service]

    def allocate(self, service: str, count: int) -> BlockTable | None:
        """Give out so many blocks, or none at all: None if there are not as many."""
        if self.num_free(service) < count:
            return None
        table = np.empty((count, 2), dtype=np.int32)
        for number in range(count):
            merged = self._with_room(service)
            places = self._free_places[merged]
            table[number] = merged, places.pop()
            self._move(service, merged, len(places) + 1, len(places))
        self._num_used[service] += count
        return table

    def free(self, service: str, table: BlockTable | Sequence[tuple[int, int]]) -> None:
        """Take blocks back.

        Raises:
            ValueError: A block is not in use by this service; nothing is freed then.
        """
        blocks = [(int(merged), int(place)) for merged, place in table]
        for merged, place in blocks:
            known = 0 <= merged < self.num_merged and self._owner[merged] == service
            if not known or not 0 <= place < self._places[service]:
                raise ValueError(f"block {(merged, place)} must be one of {service!r}.")
            if place in self._free_places[merged]:
                raise ValueError(f"block {(merged, place)} must be in use (it is free).")
        if len(set(blocks)) < len(blocks):
            raise ValueError("a block must be freed once (one is twice in the table).")
        for merged, place in blocks:
            places = self._free_places[merged]
            places.append(place)
            self._move(service, merged, len(places) - 1, len(places))
            if len(places) == self._places[service]:
                del self._begun[service][len(places)][merged]
                self._owner[merged] = None
                places.clear()
                self._free.append(merged)
        self._num_used[service] -= len(blocks)

    def use(self) -> PoolUse:
        """What the bytes are used for."""
        num_held = self.num_merged - len(self._free)
        used = sum(self._block_bytes[name] * count for name, count in self._num_used.items())
        return PoolUse(self.num_merged * self.merged_bytes, num_held * self.merged_bytes, used)

    def worst_fragmentation(self, service: str) -> float:
        """Bound of the share of a service's held bytes that it does not use.

        Waste at the ends of merged blocks, and, as blocks are freed in any order, one place of
        each merged block in use at least.
        """
        return 1.0 - self._block_bytes[service] / self.merged_bytes

    def check_integrity(self) -> None:
        """Assert that owners, places and counts agree (for tests and debug runs)."""
        held = {m for m, owner in enumerate(self._owner) if owner is not None}
        everything = sorted([*held, *self._free])
        assert everything == list(range(self.num_merged)), (
            f"{len(held)} held + {len(self._free)} free merged blocks != {self.num_merged}"
        )
        for name, count in self._places.items():
            mine = [m for m in held if self._owner[m] == name]
            free = sum(len(self._free_places[m]) for m in mine)
            assert len(mine) * count - free == self._num_used[name], (
                f"{name}: {len(mine)} x {count} places - {free} free != {self._num_used[name]}"
            )
            by_room = {m: n for n, found in enumerate(self._begun[name]) for m in found}
            assert by_room == {m: len(self._free_places[m]) for m in mine}, name
            assert count not in by_room.values(), f"{name} holds an empty merged block"

    def _with_room(self, service: str) -> int:
        """The fullest merged block of the service that has room, or a new one."""
        for found in self._begun[service][1:]:
            if found:
                return next(iter(found))
        merged = self._free.pop()
        self._owner[merged] = service
        places = self._places[service]
        self._free_places[merged] = list(range(places - 1, -1, -1))
        self._begun[service][places][merged] = None
        return merged

    def _move(self, service: str, merged: int, before: int, after: int) -> None:
        del self._begun[service][before][merged]
        self._begun[service][after][merged] = None
