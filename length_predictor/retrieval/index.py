"""Store of past prompts' vectors and lengths, searched with FAISS.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1 and Algorithm 1 lines 4 and 11: the query
database. The paper names no index and no bound; here:

- Up to 4,096 entries search is exact. Above, FAISS's inverted file with 8-bit vectors: of what
  keeps search and aggregation below 0.3 ms at 50,000 real prompts it is the one that can forget
  single entries, and the smallest (measured: see the folder's README).
- The store is bounded. An exact prompt holds at most 16 entries, its oldest makes room for the
  next; otherwise the oldest entry of all goes.
- Vectors are kept beside the index, as half floats, so that a file needs no FAISS format: the
  index is built again when the store is loaded, in about half a second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Slots = NDArray[np.int64]

DEFAULT_CAPACITY = 50_000
#: Entries of one exact prompt.
MAX_PER_PROMPT = 16
#: Most entries that are searched one by one.
MAX_EXACT = 4096
_MIN_LISTS = 16
# One list in eight is searched: 95 % of the true 32 neighbours at 50,000 entries.
_PROBED = 8
_TRAINING_PER_LIST = 64


class NeighbourStore:
    """Bounded store of unit vectors with a few numbers each. Not thread-safe.

    Args:
        dim: Width of the vectors.
        capacity: Most entries, >= 1.
        num_values: Numbers kept with each entry.
    """

    def __init__(self, dim: int, *, capacity: int = DEFAULT_CAPACITY, num_values: int = 2) -> None:
        if capacity < 1:
            raise ValueError(f"'capacity' must be >= 1 (got {capacity!r}).")
        self.dim = dim
        self.capacity = capacity
        #: Numbers of each slot [capacity, num_values], float32; NaN where the slot is free.
        self.values = np.full((capacity, num_values), np.nan, dtype=np.float32)
        self._vectors = np.zeros((capacity, dim), dtype=np.float16)
        self._keys = np.zeros(capacity, dtype=np.uint64)
        self._serials = np.full(capacity, -1, dtype=np.int64)
        self._next_serial = 0
        self._slots_of: dict[int, deque[int]] = {}
        # Slots and serials in order of age; a pair is stale when its slot has a newer serial.
        self._by_age: deque[tuple[int, int]] = deque()
        self._free = list(range(capacity - 1, -1, -1))
        self._index: Any = self._exact_index()
        self._num_lists = 0
        self._train_at = MAX_EXACT + 1
        self.num_evicted = 0

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    @property
    def is_exact(self) -> bool:
        """Whether every entry is compared."""
        return self._num_lists == 0

    @property
    def num_bytes(self) -> int:
        """Memory of vectors, values and index, roughly."""
        per_entry = 4 * self.dim if self.is_exact else self.dim + 8
        arrays = (self._vectors, self.values, self._keys, self._serials)
        return sum(array.nbytes for array in arrays) + len(self) * per_entry

    def add(self, vectors: Vectors, values: NDArray[Any], keys: NDArray[np.uint64]) -> None:
        """Take in entries, oldest first; evicts as many as do not fit.

        Args:
            vectors: Unit vectors [n, dim].
            values: Numbers of each [n, num_values], finite.
            keys: Hash of each exact prompt [n].
        """
        if (
            vectors.shape[1:] != (self.dim,)
            or len(vectors) != len(values)
            or len(keys) != len(vectors)
        ):
            raise ValueError(
                f"'vectors' must be [n, {self.dim}] with n values and n keys (got "
                f"{vectors.shape}, {len(values)} and {len(keys)})."
            )
        for start in range(0, len(vectors), self.capacity):
            part = slice(start, start + self.capacity)
            self._add(vectors[part], values[part], keys[part])

    def search(self, vectors: Vectors, num_neighbours: int) -> tuple[NDArray[np.float32], Slots]:
        """The most similar entries of each vector, best first.

        Returns:
            Similarities [n, k] and slots [n, k]; -1 and a similarity of -1 where there are fewer.
        """
        queries = np.ascontiguousarray(vectors, dtype=np.float32)
        if not len(self):
            shape = (len(queries), num_neighbours)
            return np.full(shape, -1.0, dtype=np.float32), np.full(shape, -1, dtype=np.int64)
        similarity, slots = self._index.search(queries, num_neighbours)
        similarity[slots < 0] = -1.0
        return similarity, slots

    def vector_of(self, key: int) -> Vectors | None:
        """The vector of a prompt that is stored with this hash, or None."""
        slots = self._slots_of.get(key)
        return self._vectors[slots[-1]].astype(np.float32) if slots else None

    def num_of(self, key: int) -> int:
        """Entries of an exact prompt."""
        return len(self._slots_of.get(key, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts disagree."""
        used = np.flatnonzero(self._serials >= 0)
        assert len(used) == len(self) == self._index.ntotal, (
            f"{len(used)} slots used, {len(self)} counted, {self._index.ntotal} indexed"
        )
        by_key = sorted(slot for slots in self._slots_of.values() for slot in slots)
        assert by_key == used.tolist(), f"{len(by_key)} slots by key, {len(used)} used"
        assert all(0 < len(slots) <= MAX_PER_PROMPT for slots in self._slots_of.values())
        assert np.isfinite(self.values[used]).all()
        live = [slot for slot, serial in self._by_age if self._serials[slot] == serial]
        assert sorted(live) == used.tolist(), f"{len(live)} slots by age, {len(used)} used"

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Entries from oldest to newest, and the capacity."""
        used = np.flatnonzero(self._serials >= 0)
        used = used[np.argsort(self._serials[used])]
        return {
            "vectors": self._vectors[used],
            "values": self.values[used],
            "keys": self._keys[used],
            "shape": np.array([self.capacity, self.dim, self.values.shape[1]]),
        }

    @classmethod
    def from_arrays(
        cls, arrays: dict[str, NDArray[Any]], *, capacity: int | None = None
    ) -> NeighbourStore:
        """Inverse of ``to_arrays``; a smaller capacity keeps the newest entries."""
        stored_capacity, dim, num_values = arrays["shape"].tolist()
        store = cls(dim, capacity=capacity or stored_capacity, num_values=num_values)
        part = slice(-store.capacity, None)
        store.add(
            arrays["vectors"][part].astype(np.float32),
            arrays["values"][part],
            arrays["keys"][part],
        )
        store.num_evicted = 0
        return store

    # Inside ---------------------------------------------------------------------------------

    def _add(self, vectors: Vectors, values: NDArray[Any], keys: NDArray[np.uint64]) -> None:
        gone: list[int] = []
        slots = np.empty(len(vectors), dtype=np.int64)
        for row, key in enumerate(keys.tolist()):
            mine = self._slots_of.setdefault(key, deque())
            if len(mine) == MAX_PER_PROMPT:
                gone.append(self._drop(mine[0]))
                mine = self._slots_of.setdefault(key, deque())
            elif not self._free:
                gone.append(self._drop(self._oldest()))
                mine = self._slots_of.setdefault(key, deque())
            slot = slots[row] = self._free.pop()
            mine.append(slot)
            self._keys[slot] = key
            self._serials[slot] = self._next_serial
            self._by_age.append((slot, self._next_serial))
            self._next_serial += 1
            self._vectors[slot] = vectors[row]
            self.values[slot] = values[row]
        if len(self._by_age) > 2 * self.capacity + 64:
            self._by_age = deque(pair for pair in self._by_age if self._serials[pair[0]] == pair[1])
        if len(self) >= self._train_at or self._next_serial >= self._train_at + self.capacity:
            self._build()
            return
        if gone:
            self._index.remove_ids(np.unique(np.array(gone, dtype=np.int64)))
        slots = np.unique(slots)  # one that was filled twice in this batch holds the later entry
        self._index.add_with_ids(self._vectors[slots].astype(np.float32), slots)

    def _drop(self, slot: int) -> int:
        key = int(self._keys[slot])
        mine = self._slots_of[key]
        mine.remove(slot)
        if not mine:
            del self._slots_of[key]
        self._serials[slot] = -1
        self.values[slot] = np.nan
        self._free.append(slot)
        self.num_evicted += 1
        return slot

    def _oldest(self) -> int:
        while True:
            slot, serial = self._by_age.popleft()
            if self._serials[slot] == serial:
                return slot

    def _exact_index(self) -> Any:
        return faiss.IndexIDMap2(faiss.IndexFlatIP(self.dim))

    def _build(self) -> None:
        """A new index of all entries; lists are learned from their vectors."""
        used = np.flatnonzero(self._serials >= 0)
        vectors = self._vectors[used].astype(np.float32)
        size = len(used)
        if size <= MAX_EXACT:
            self._index, self._num_lists = self._exact_index(), 0
            self._train_at = MAX_EXACT + 1
        else:
            self._num_lists = max(_MIN_LISTS, 2 ** round(np.log2(size**0.5)))
            self._index = faiss.index_factory(
                self.dim, f"IVF{self._num_lists},SQ8", faiss.METRIC_INNER_PRODUCT
            )
            self._index.nprobe = max(_PROBED, self._num_lists // _PROBED)
            step = max(1, size // (self._num_lists * _TRAINING_PER_LIST))
            self._index.train(vectors[::step])
            library: Any = faiss  # its hints lack this name
            self._index.set_direct_map_type(library.DirectMap.Hashtable)
            # Again at twice the size, or when all entries have been replaced.
            self._train_at = 2 * size
        # Ages are counted afresh, so that they tell when everything has been replaced.
        order = used[np.argsort(self._serials[used])]
        self._serials[order] = np.arange(size)
        self._next_serial = size
        self._by_age = deque(zip(order.tolist(), range(size), strict=True))
        self._index.add_with_ids(vectors, used)


def use_one_thread() -> None:
    """Let FAISS search on the calling thread only."""
    faiss.omp_set_num_threads(1)
