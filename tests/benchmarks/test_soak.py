"""The soak's verdict, and a minute of the soak itself."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from soak import verdict

#: Four looks at one process that keeps what it has.
FLAT: list[dict[str, Any]] = [
    {
        "processes": {
            "engine": {
                "memory_kib": 800_000, "threads": 14, "files": 50, "tasks": 0, "objects": 90_000,
                "tables": {"Table.rows": 64, "Book.fates": 3_000},
            }
        }
    }
] * 8  # fmt: skip
OUTCOME = {
    "num_sent": 30, "outcomes": {"answered": 20, "refused": 4, "left": 6}, "examples": {},
    "aside": {"engine": 0}, "minutes": 15.0,
}  # fmt: skip


def growing(name: str, by: int, table: str = "") -> list[dict[str, Any]]:
    looks = [copy.deepcopy(look) for look in FLAT]
    for place, look in enumerate(looks):
        held = look["processes"]["engine"]
        held = held["tables"] if table else held
        held[table or name] = held.get(table or name, 0) + place * by
    return looks


def test_what_stays_as_it_is_passes() -> None:
    assert verdict.problems(OUTCOME, FLAT) == []


@pytest.mark.parametrize(
    ("name", "by", "table"),
    [("memory_kib", 10_000, ""), ("threads", 1, ""), ("files", 2, ""), ("tasks", 1, ""),
     ("objects", 2_000, ""), ("tables", 100, "Table.rows"), ("tables", 60, "New.rows")],
)  # fmt: skip
def test_what_grows_is_named(name: str, by: int, table: str) -> None:
    found = verdict.problems(OUTCOME, growing(name, by, table))

    assert len(found) == 1
    assert found[0].startswith(f"engine: {name}{'/' if table else ''}{table} grew from")


def test_one_look_that_is_larger_says_nothing() -> None:
    looks = [copy.deepcopy(look) for look in FLAT]
    looks[-2]["processes"]["engine"]["memory_kib"] *= 2

    assert verdict.problems(OUTCOME, looks) == []


@pytest.mark.parametrize(
    ("files", "is_found"),
    [
        ((17, 23, 33, 11, 16, 26), False),  # a pool of connections, as a soak had it
        ((17, 23, 33, 21, 26, 36), True),
        ((17, 18, 19, 20, 21, 22), True),
    ],
)
def test_what_comes_and_goes_has_grown_if_its_least_has(
    files: tuple[int, ...], is_found: bool
) -> None:
    looks = copy.deepcopy(FLAT[:6]) + [copy.deepcopy(FLAT[0]) for _ in files]
    for look, number in zip(looks[6:], files, strict=True):
        look["processes"]["engine"]["files"] = number

    assert bool(verdict.problems(OUTCOME, looks)) is is_found


def test_of_a_short_soak_what_fills_slowly_is_not_judged() -> None:
    short = OUTCOME | {"minutes": 1.0}

    assert verdict.problems(short, growing("memory_kib", 10_000)) == []
    assert verdict.problems(short, growing("tables", 100, "Table.rows")) == []
    assert len(verdict.problems(short, growing("threads", 1))) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcomes": {"answered": 20, "refused": 4, "left": 6, "HTTP 500": 1}, "num_sent": 31},
         "1 requests: HTTP 500 ()"),
        ({"num_sent": 31}, "1 of 31 have no outcome"),
        ({"aside": {"engine": 3}}, "engine stepped aside"),
    ],
)  # fmt: skip
def test_requests_without_a_proper_answer_fail_it(change: dict[str, Any], said: str) -> None:
    assert verdict.problems(OUTCOME | change, FLAT) == [said]


def test_clients_that_have_ended_leave_nothing_open() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    from soak.traffic import clients

    async def open_and_end() -> list[aiohttp.ClientSession]:
        async with clients("http://127.0.0.1:1", 0) as asking:
            opened = [asking._session]
            await asking.until_all_ended()
            opened.append(asking._session)
        return [*opened, asking._session]

    sessions = asyncio.run(open_and_end())

    assert sessions[0] is not sessions[1]
    assert all(session.closed for session in sessions)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_minute_of_everything_at_once_loses_nothing() -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("aiohttp")
    from soak.experiment import run

    rows = list(run(1.0))

    outcome = rows[-1]
    assert verdict.problems(outcome, [row for row in rows if row.get("is_idle")]) == []
    assert outcome["outcomes"]["answered"] > 300
    assert outcome["outcomes"]["left"] > 10
    assert sum(outcome["preemptions"].values()) > 100
    assert outcome["disturbed"]["pauses"] > 1
