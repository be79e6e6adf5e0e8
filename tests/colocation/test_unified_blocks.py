"""Services with blocks of different sizes in one pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.colocation.unified_blocks import BlockTable, MergedPool, merged_block_bytes
from sola_sched.errors import ConfigError

#: Llama2-7B and 13B: 16 tokens x layers x 2 x hidden size x 2 bytes.
L7, L13 = 16 * 32 * 2 * 4096 * 2, 16 * 40 * 2 * 5120 * 2


@pytest.mark.parametrize(
    ("sizes", "length"),
    [([L7], L7), ([L7, L7], L7), ([L7, L13], 2 * L13), ([3, 7], 7 * 3), ([1, 100], 100)],
    ids=["one", "equal", "Llama2-7B and 13B", "no common factor", "tiny"],
)
def test_a_merged_block_is_the_shortest_that_wastes_little(sizes: list[int], length: int) -> None:
    assert merged_block_bytes(sizes) == length


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=5))
def test_a_merged_block_holds_one_of_every_service_and_is_not_long(sizes: list[int]) -> None:
    length = merged_block_bytes(sizes)

    assert max(sizes) <= length <= 16 * max(sizes)


def make_pool(num_merged: int = 4) -> MergedPool:
    """Merged blocks of 12 bytes: 4 of `small`, 2 of `large`."""
    return MergedPool(12 * num_merged, {"small": 3, "large": 5}, 12)


def test_blocks_of_a_service_fill_one_merged_block_after_the_other() -> None:
    pool = make_pool()

    table = pool.allocate("small", 6)

    assert table is not None
    assert table.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]


def test_services_do_not_share_a_merged_block() -> None:
    pool = make_pool()
    small, large = pool.allocate("small", 1), pool.allocate("large", 1)

    assert small is not None
    assert large is not None
    assert small[0, 0] != large[0, 0]
    assert pool.num_free("small") == 3 + 2 * 4
    assert pool.num_free("large") == 1 + 2 * 2


def test_the_fullest_merged_block_is_filled_first() -> None:
    pool = make_pool()
    table = pool.allocate("small", 8)
    assert table is not None
    pool.free("small", table[[0, 1, 2, 4]])  # three places of one, one of the other

    again = pool.allocate("small", 1)

    assert again is not None
    assert again[0].tolist() == table[4].tolist()


def test_an_empty_merged_block_may_be_had_by_another_service() -> None:
    pool = make_pool(1)
    table = pool.allocate("small", 4)
    assert table is not None
    assert pool.allocate("large", 1) is None

    pool.free("small", table)

    assert pool.allocate("large", 2) is not None
    assert pool.allocate("large", 1) is None


def test_what_does_not_fit_takes_nothing() -> None:
    pool = make_pool(1)

    assert pool.allocate("small", 5) is None

    assert pool.num_free("small") == 4
    assert pool.use().held == 0


def test_use_counts_bytes() -> None:
    pool = make_pool()
    pool.allocate("small", 1)
    pool.allocate("large", 2)

    use = pool.use()

    assert (use.total, use.held, use.used) == (48, 24, 13)
    assert use.fragmentation == pytest.approx(11 / 24)


@pytest.mark.parametrize(
    ("service", "table"),
    [("small", [(0, 1)]), ("large", [(0, 0)]), ("small", [(0, 0), (0, 0)]), ("small", [(9, 0)]),
     ("small", [(0, 0), (3, 0)]), ("small", [(0, -1)])],
    ids=["free", "another's", "twice", "none", "one wrong", "below"],
)  # fmt: skip
def test_a_block_that_is_not_in_use_is_not_freed(
    service: str, table: list[tuple[int, int]]
) -> None:
    pool = make_pool()
    pool.allocate("small", 1)

    with pytest.raises(ValueError, match="must be"):
        pool.free(service, table)

    pool.check_integrity()
    assert pool.use().used == 3


@pytest.mark.parametrize(
    ("total", "sizes", "length", "words"),
    [(100, {"a": 20}, 10, "must fit into a merged block of 10 bytes"),
     (5, {"a": 3}, 10, "must hold a merged block of 10 bytes"),
     (100, {"a": 0}, None, "at least 1 byte"), (100, {}, None, "at least 1 byte")],
    ids=["too large", "small pool", "no bytes", "nobody"],
)  # fmt: skip
def test_a_pool_that_cannot_be_is_refused(
    total: int, sizes: dict[str, int], length: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MergedPool(total, sizes, length)


@given(data=st.data(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=60)
def test_no_block_is_given_out_twice_and_none_is_lost(
    data: st.DataObject, sizes: list[int]
) -> None:
    names = {f"s{number}": size for number, size in enumerate(sizes)}
    length = merged_block_bytes(sizes)
    pool = MergedPool(length * data.draw(st.integers(1, 6)), names)
    held: dict[str, list[BlockTable]] = {name: [] for name in names}

    for _ in range(data.draw(st.integers(0, 25))):
        name = data.draw(st.sampled_from(sorted(names)))
        if held[name] and data.draw(st.booleans()):
            table = held[name].pop(data.draw(st.integers(0, len(held[name]) - 1)))
            cut = data.draw(st.integers(0, len(table)))
            pool.free(name, table[:cut])
            held[name].append(table[cut:])
        else:
            count = data.draw(st.integers(0, 12))
            could = pool.num_free(name)
            taken = pool.allocate(name, count)
            assert (taken is None) == (count > could)
            if taken is not None:
                assert pool.num_free(name) == could - count
                held[name].append(taken)
        pool.check_integrity()
        mine = {name: [tuple(b) for t in held[name] for b in t.tolist()] for name in names}
        blocks = [block for found in mine.values() for block in found]
        assert len(set(blocks)) == len(blocks), "a block is given out twice"
        owners: dict[int, str] = {}
        for name, found in mine.items():
            for merged, place in found:
                assert owners.setdefault(merged, name) == name, "a merged block has two services"
                assert (place + 1) * names[name] <= pool.merged_bytes
        use = pool.use()
        assert use.used == sum(names[name] * len(found) for name, found in mine.items())
        assert use.held == len(owners) * pool.merged_bytes
        assert use.fragmentation <= max(map(pool.worst_fragmentation, names)) + 1e-9
    for name, tables in held.items():
        for table in tables:
            pool.free(name, table)
    assert pool.use().held == 0
    assert pool.num_free("s0") == pool.num_merged * pool.places("s0")
