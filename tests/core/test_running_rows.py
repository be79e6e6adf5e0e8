"""Rows follow the engine's list, whatever is done with it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sola_sched.core.running_rows import RunningRows


@dataclass(eq=False)
class Named:
    request_id: str


class Lookups(dict[str, int]):
    """Counts how often a row is looked up."""

    count = 0

    def __getitem__(self, name: str) -> int:
        self.count += 1
        return super().__getitem__(name)


def make(num: int) -> tuple[list[Named], Lookups, RunningRows[Named]]:
    requests = [Named(f"r{i}") for i in range(num)]
    row_of = Lookups((request.request_id, 7 * i % 101) for i, request in enumerate(requests))
    return requests, row_of, RunningRows(row_of)


_CHANGES = st.tuples(
    st.sampled_from(["go", "go", "come", "come", "swap", "front", "new list", "hide"]),
    st.integers(0, 1000),
)


@given(st.lists(st.lists(_CHANGES, max_size=14), max_size=12))
def test_rows_are_those_of_the_list(steps: list[list[tuple[str, int]]]) -> None:
    requests, row_of, rows = make(100)
    running, others = requests[:20], requests[20:]
    for changes in steps:
        for change, number in changes:
            place = number % max(1, len(running))
            if change == "go" and running:
                gone = running.pop(place)
                others.append(gone)
                if number % 3:  # it may be told, or not
                    rows.left(row_of[gone.request_id])
            elif change == "come" and others:
                running.append(others.pop(number % len(others)))
            elif change == "front" and others:
                running.insert(0, others.pop())
            elif change == "swap" and running:
                running[place], running[0] = running[0], running[place]
            elif change == "new list":
                running = list(running)
            elif change == "hide" and running:
                held = running[place:]
                running = running[:place][::-1]
                rows.put(running, rows.of(running))
                running.extend(held)
        expected = [row_of.get(request.request_id) for request in running]
        assert rows.of(running).tolist() == expected


def test_an_unchanged_list_has_the_same_array() -> None:
    requests, _, rows = make(50)
    first = rows.of(requests)
    assert rows.of(list(requests)) is first
    requests.append(requests.pop(3))
    assert rows.of(requests) is not first


def test_whoever_was_told_too_early_is_found_again() -> None:
    requests, row_of, rows = make(5)
    first = rows.of(requests)
    rows.left(row_of["r2"])
    rows.left(row_of["r2"])  # and again, when it is not there
    assert len(rows.known) == 4
    assert rows.of(requests).tolist() == first.tolist()


def test_only_those_who_come_are_looked_up() -> None:
    requests, row_of, rows = make(60)
    running = requests[:50]
    rows.of(running)
    row_of.count = 0
    for place in (0, 17, 40, 46):
        rows.left(dict.__getitem__(row_of, running[place].request_id))
        del running[place]
    running += requests[50:53]
    rows.of(running)
    assert row_of.count == 3
