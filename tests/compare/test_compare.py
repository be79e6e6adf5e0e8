"""`python -m sola_sched.compare`: which is better, and whether that may be chance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fates import a_fate
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.compare.cli import Share, compared, difference, main


def served(attained: int, missed: int, every_s: float = 1.0) -> list[dict[str, Any]]:
    """Their ends far from each other, as those of no common queue."""
    count = attained + missed
    ends = ["attained" if i * attained % count < attained else "missed" for i in range(count)]
    return [
        a_fate(f"r{place}", end=end, arrival_s=every_s * place, first_token_s=every_s * place + 0.5)
        for place, end in enumerate(ends)
    ]


def test_an_answer_that_lacks_fields_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "window.json"
    path.write_text(json.dumps({"requests": [{"request_id": "a", "missed": []}]}))

    assert main([str(path), str(path)]) == 2

    assert "(of request 1 it has no 'arrival_s')" in capsys.readouterr().err


def test_a_request_that_cannot_be_read_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "window.json"
    path.write_text(json.dumps({"requests": [*served(60, 0), {"request_id": "a"}]}))

    assert main([str(path), str(path)]) == 0

    said = "1 of 61 requests are left out (of request 61 it has no 'arrival_s')."
    assert capsys.readouterr().err.splitlines() == [f"ONE: {said}", f"OTHER: {said}"]


def test_engines_of_a_data_parallel_server_are_taken_by_themselves() -> None:
    """Neighbours are those on the same engine; rates add up, whatever the clocks say."""
    first, second = served(60, 0), served(0, 60)
    alike = [fate | {"engine": 0} for fate in first]
    alike += [
        fate | {"engine": 1, "arrival_s": fate["arrival_s"] + 1e6, "request_id": f"s{place}"}
        for place, fate in enumerate(second)
    ]
    mixed = [fate for pair in zip(alike[:60], alike[60:], strict=True) for fate in pair]

    assert Share.of(mixed) == Share.of(alike)
    assert Share.of(mixed).worth is not None
    low, high = Share.of(mixed).interval()
    assert high - low > 0.5  # two engines, each of one mind
    assert "unequal loads" not in compared(mixed, served(60, 60, every_s=0.5))


@given(st.integers(1, 400), st.integers(1, 400), st.data())
def test_an_interval_holds_the_difference_and_lies_within_what_there_can_be(
    n: int, m: int, data: st.DataObject
) -> None:
    one = Share(data.draw(st.integers(0, n)), n)
    other = Share(data.draw(st.integers(0, m)), m)
    by, low, high = difference(one, other)
    assert -1.0 - 1e-9 <= low <= by <= high <= 1.0 + 1e-9
    back = difference(other, one)
    assert back == pytest.approx((-by, -high, -low))


def test_the_interval_holds_the_true_difference_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        one, other = rng.binomial(120, 0.9), rng.binomial(150, 0.8)
        _, low, high = difference(Share(int(one), 120), Share(int(other), 150))
        held += low <= -0.1 <= high
    assert 0.935 < held / 2000 < 0.97


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (served(60, 40), served(95, 5), "OTHER is better: +35.0 points, 95 % interval +24"),
        (served(95, 5), served(60, 40), "ONE is better: -35.0 points"),
        (served(90, 10), served(92, 8), "Which is better cannot be said: +2.0 points"),
        (served(90, 10), served(90, 10), "(they may be equal)."),
    ],
)
def test_what_is_concluded(
    one: list[dict[str, Any]], other: list[dict[str, Any]], said: str
) -> None:
    assert said in compared(one, other)


def test_requests_that_clients_ended_in_time_count_neither_way() -> None:
    aborted = [a_fate("gone", end="aborted", arrival_s=1.0)] * 50
    assert compared(served(60, 40), served(95, 5) + aborted).splitlines()[1:3] == [
        "requests           100         100",
        "in time          60.0%       95.0%",
    ]


def test_unequal_loads_are_said() -> None:
    assert "But they had unequal loads: 1.00 and 2.00 requests a second." in compared(
        served(60, 40), served(95, 5, every_s=0.5)
    )
    assert "unequal" not in compared(served(60, 40), served(95, 5))


@pytest.mark.parametrize(("load", "most"), [(0.7, 0.10), (0.9, 0.15)])
def test_two_servers_that_are_alike_are_seldom_called_different(load: float, most: float) -> None:
    rng = np.random.default_rng(0)
    found = [
        difference(Share.of(queue(rng, load)), Share.of(queue(rng, load)))
        for _ in range(_NUM_PAIRS)
    ]
    assert sum(low > 0.0 or high < 0.0 for _, low, high in found) <= most * _NUM_PAIRS


def test_a_server_that_is_much_better_is_found_at_heavy_load() -> None:
    rng = np.random.default_rng(1)
    _, low, _ = difference(Share.of(queue(rng, 0.9, 0.5)), Share.of(queue(rng, 0.9, 0.95)))
    assert low > 0.0


def test_requests_are_taken_by_their_arrival_whatever_order_they_are_told_in() -> None:
    fates = queue(np.random.default_rng(2), 0.7)
    assert Share.of(fates) == Share.of(fates[::-1]) == Share.of(sorted(fates, key=str))


_NUM_PAIRS = 200


def queue(rng: np.random.Generator, load: float, in_time: float = 0.8) -> list[dict[str, Any]]:
    """What a server remembers: one queue, exponential times, a target that this share meets."""
    count, before = 4096, 8192
    arrivals_s = np.cumsum(rng.exponential(1.0 / load, count + before))
    served_s = np.cumsum(services_s := rng.exponential(1.0, count + before))
    ends_s = served_s + np.maximum.accumulate(arrivals_s - (served_s - services_s))
    is_met = ends_s - arrivals_s <= -math.log(1.0 - in_time) / (1.0 - load)
    return [
        {"end": "attained" if met else "missed", "arrival_s": float(at)}
        for met, at in zip(is_met[before:], arrivals_s[before:], strict=True)
    ]


def test_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, requests in zip(paths, (served(60, 40), served(95, 5)), strict=True):
        path.write_text(json.dumps({"requests": requests, "engine": None}))
    assert main([str(path) for path in paths]) == 0
    assert "OTHER is better" in capsys.readouterr().out


def test_too_few_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"requests": served(3, 3), "engine": None}))
    assert main([str(path), str(path)]) == 2
    assert capsys.readouterr().err == (
        "error: 'ONE' must have at least 30 requests that have ended (got 6); compare again when "
        "it has served more.\n"
    )
