"""Neighbour store: search against brute force, eviction, integrity under any updates."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.length_predictor.retrieval import index  # noqa: E402
from sola_sched.length_predictor.retrieval.index import MAX_PER_PROMPT, NeighbourStore  # noqa: E402

DIM = 16
#: Vectors are kept as half floats, whose relative error is 2^-11; a dot product of two unit vectors
#: adds at most that.
HALF_ERROR = 2.0**-10
#: Eight bits over a range of about 2 in each of 16 dimensions.
EIGHT_BIT_ERROR = 0.02


def unit(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    vectors = rng.normal(size=(count, DIM)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def fill(
    store: NeighbourStore, vectors: NDArray[np.float32], keys: NDArray[np.uint64] | None = None
) -> None:
    values = np.stack([np.arange(len(vectors)), np.zeros(len(vectors))], axis=1)
    if keys is None:
        keys = np.arange(len(vectors), dtype=np.uint64)
    store.add(vectors, values, keys)


@pytest.mark.parametrize("count", [1, 7, 500])
def test_search_agrees_with_brute_force_up_to_ties(count: int) -> None:
    rng = np.random.default_rng(count)
    vectors = unit(rng, count)
    vectors[count // 2 :] = vectors[: count - count // 2]  # every similarity occurs twice
    store = NeighbourStore(DIM, capacity=count)
    fill(store, vectors)
    queries = unit(rng, 20)

    similarity, slots = store.search(queries, 5)

    truth = -np.sort(-(queries @ vectors.T), axis=1)[:, :5]
    found = min(5, count)
    np.testing.assert_allclose(similarity[:, :found], truth[:, :found], atol=HALF_ERROR)
    assert (slots[:, found:] == -1).all()
    for row, query in enumerate(queries):
        mine = slots[row, :found]
        assert len(set(mine.tolist())) == found
        # Equal similarities may come in any order: each slot must have the one it is given with.
        chosen = store.values[mine, 0].astype(int)
        np.testing.assert_allclose(
            vectors[chosen] @ query, similarity[row, :found], atol=HALF_ERROR
        )


def test_large_store_finds_most_true_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_EXACT", 500)
    rng = np.random.default_rng(0)
    centres = unit(rng, 40)
    raw = centres[rng.integers(0, 40, 3000)] + 0.15 * rng.normal(size=(3000, DIM))
    vectors = np.asarray(raw / np.linalg.norm(raw, axis=1, keepdims=True), dtype=np.float32)
    store = NeighbourStore(DIM, capacity=3000)

    fill(store, vectors)
    similarity, slots = store.search(vectors[:200], 8)

    assert not store.is_exact
    store.check_integrity()
    truth = np.argsort(-(vectors[:200] @ vectors.T), axis=1)[:, :8]
    chosen = store.values[slots, 0].astype(int)
    recall = np.mean([len({*a} & {*b}) / 8 for a, b in zip(chosen.tolist(), truth, strict=True)])
    assert recall > 0.9
    exact = np.take_along_axis(vectors[:200] @ vectors.T, chosen, axis=1)
    np.testing.assert_allclose(similarity, exact, atol=EIGHT_BIT_ERROR)


def test_empty_store_finds_nothing() -> None:
    similarity, slots = NeighbourStore(DIM).search(unit(np.random.default_rng(0), 2), 3)

    assert (slots == -1).all()
    assert (similarity == -1.0).all()


def test_oldest_entry_goes_first() -> None:
    store = NeighbourStore(DIM, capacity=3)
    vectors = unit(np.random.default_rng(0), 5)

    fill(store, vectors)

    assert sorted(store.values[:, 0].tolist()) == [2.0, 3.0, 4.0]
    assert store.num_evicted == 2


def test_repeated_prompt_replaces_its_own_oldest_entry() -> None:
    store = NeighbourStore(DIM, capacity=100)
    rng = np.random.default_rng(0)
    fill(store, unit(rng, 1), np.array([7], dtype=np.uint64))

    fill(store, unit(rng, 50), np.full(50, 8, dtype=np.uint64))

    assert store.num_of(7) == 1
    assert store.num_of(8) == MAX_PER_PROMPT
    kept = store.to_arrays()["values"][:, 0].tolist()
    assert kept == [0.0, *range(50 - MAX_PER_PROMPT, 50)]


def test_wrong_shapes_are_refused() -> None:
    store = NeighbourStore(DIM)

    with pytest.raises(ValueError, match=r"must be \[n, 16\]"):
        store.add(np.zeros((2, 3), np.float32), np.zeros((2, 2)), np.zeros(2, np.uint64))


class Model:
    """The eviction rule in the plainest words: a list of (key, value), oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: deque[tuple[int, float]] = deque()

    def add(self, key: int, value: float) -> None:
        same = [entry for entry in self.entries if entry[0] == key]
        if len(same) == MAX_PER_PROMPT:
            self.entries.remove(same[0])
        elif len(self.entries) == self.capacity:
            self.entries.popleft()
        self.entries.append((key, value))


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 40),
    exact=st.integers(1, 60),
    batches=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=30), max_size=12),
)
def test_any_sequence_of_updates_keeps_what_the_rule_keeps(
    capacity: int, exact: int, batches: list[list[int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "MAX_EXACT", max(exact, 20))
        patch.setattr(index, "_MIN_LISTS", 1)
        store, model = NeighbourStore(DIM, capacity=capacity), Model(capacity)
        rng = np.random.default_rng(0)
        number = 0.0
        for batch in batches:
            values = np.arange(number, number + len(batch))
            store.add(
                unit(rng, len(batch)),
                np.stack([values, values], axis=1),
                np.array(batch, dtype=np.uint64),
            )
            for key, value in zip(batch, values.tolist(), strict=True):
                model.add(key, value)
            number += len(batch)

            store.check_integrity()
            arrays = store.to_arrays()
            kept = zip(arrays["keys"].tolist(), arrays["values"][:, 0].tolist(), strict=True)
            assert list(kept) == list(model.entries)
            _, slots = store.search(unit(rng, 1), 5)
            assert (slots >= 0).sum() == min(5, len(store))


def test_stored_and_loaded_entries_are_the_same() -> None:
    store = NeighbourStore(DIM, capacity=10)
    vectors = unit(np.random.default_rng(0), 14)
    fill(store, vectors)

    copy = NeighbourStore.from_arrays(store.to_arrays())
    smaller = NeighbourStore.from_arrays(store.to_arrays(), capacity=4)

    for name, array in store.to_arrays().items():
        np.testing.assert_array_equal(copy.to_arrays()[name], array)
    assert sorted(smaller.values[:, 0].tolist()) == [10.0, 11.0, 12.0, 13.0]
