"""Requests of a data parallel server are explained, and replayed, beside those of their engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from fates import a_fate

from sola_sched.errors import ConfigError
from sola_sched.explain.cli import main, of_all, of_one
from sola_sched.explain.html import write
from sola_sched.explain.replay import Replay, Way
from sola_sched.explain.source import Window, read
from sola_sched.explain.trace import events

pytestmark = pytest.mark.vllm

LATE = {"end": "missed", "started_s": 13.0, "first_token_s": 13.3, "last_token_s": 14.3,
        "ended_s": 14.3, "waited_s": (0.0, 0.0, 3.0)}  # fmt: skip


def facts(max_num_seqs: int = 64, ttft_s: float = 0.5) -> dict[str, Any]:
    """An engine whose prompts take 10 ms and 0.1 ms a token, and whose decodes take 20 ms."""
    step_times = {"a0": 1e-9, "b0": 1e-9, "c0": 1e-4, "d0": 0.01, "a1": 1e-4, "b1": 1e-8}
    return {
        "coefficients": {**step_times, "c1": 0.02, "overlap": 0.0},
        "gamma": {"prefill": 1.0, "decode": 1.0, "mixed": 1.0},
        "engine_args": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048,
                        "max_model_len": 8192, "num_gpu_blocks_override": 6000},
        "options": {"ttft_s": ttft_s, "tpot_s": 0.1},
    }  # fmt: skip


def served(engine: int, seed: int, begin_s: float = 0.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    arrivals = begin_s + np.cumsum(rng.exponential(1 / 8, 80))
    return [
        a_fate(
            f"e{engine}-{place}", arrival_s=at, started_s=at, first_token_s=at + 0.1,
            last_token_s=at + 1.0, ended_s=at + 1.0, ttft_s=0.5,
            num_prompt=int(rng.integers(200, 1500)), num_output=int(rng.integers(20, 60)),
        ) | {"engine": engine}
        for place, at in enumerate(arrivals.tolist())
    ]  # fmt: skip


def test_others_are_those_of_its_engine() -> None:
    """Of a flood on another engine nothing is said."""
    late = a_fate("late", "chat", **LATE, num_before=1, num_overtook=1) | {"engine": 1}
    flood = [
        a_fate(f"job{place}", "job", arrival_s=9.0 + 0.4 * place, started_s=11.0) | {"engine": 0}
        for place in range(5)
    ]
    alone = of_one(late, Window([late], None))
    told = of_one(late, Window([*flood, late], None))

    assert told == alone.replace("(class chat)", "(class chat, engine 1)")
    assert "of class job" in of_one(
        late, Window([fate | {"engine": 1} for fate in [*flood, late]], None)
    )


def test_late_ones_are_counted_by_engine() -> None:
    late = [a_fate(f"r{place}", **LATE) | {"engine": place} for place in (0, 1, 1)]
    said = of_all(Window([*late, a_fate("fine") | {"engine": 0}], None))
    assert "By engine: engine 0 1 of 2, engine 1 2 of 2.\n" in said
    assert "  r1 (default, engine 1): It was late" in said
    assert "engine" not in of_all(Window([late[1]], None))  # the only one of this front end


def test_each_engine_is_served_again_by_itself() -> None:
    """With its own settings, and not as one engine that gets all requests."""
    one, other = served(0, 0), served(1, 1, begin_s=1e6)
    fewer = facts(max_num_seqs=8)
    both = Window([*one, *other], facts(), {0: facts(), 1: fewer})
    replay = Replay(both)
    way = Way("sola_sched", "sola")

    assert (replay.num_requests, replay.num_engines, replay.num_left_out) == (160, 2, 0)
    found = {record.req_id: record.ttft_s for record in replay.run(way)}
    alone = [
        record
        for requests, engine in ((one, facts()), (other, fewer))
        for record in Replay(Window(requests, engine)).run(way)
    ]
    assert found == {record.req_id: pytest.approx(record.ttft_s) for record in alone}


def test_more_engines_are_more_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "window.json"
    window = Window([*served(0, 0), *served(1, 1)], facts(), {0: facts(), 1: facts()})
    path.write_text(json.dumps(window.to_json()))
    assert read(str(path)) == window

    assert main([str(path), "--replay", "--engines", "3"]) == 0

    said = capsys.readouterr().out
    assert said.startswith("160 recorded requests of 2 engines, in virtual time:")
    assert said.splitlines()[-1].startswith("6 engines ")


def test_an_engine_that_has_not_told_its_step_times_is_named() -> None:
    with pytest.raises(ConfigError, match="has not told of engine 1 "):
        Replay(Window([*served(0, 0), *served(1, 1)], facts(), {0: facts()}))


def test_a_file_without_engines_is_of_one() -> None:
    old = [{name: value for name, value in fate.items() if name != "engine"}
           for fate in served(0, 0)]  # fmt: skip
    assert Replay(Window(old, facts())).num_engines == 1


def test_the_timeline_has_processes_for_each_engine() -> None:
    fates = [a_fate("a", "chat"), a_fate("b", "job") | {"engine": 1, "arrival_s": 1e6,
             "started_s": 1e6, "first_token_s": 1e6 + 0.5, "last_token_s": 1e6 + 1.0,
             "ended_s": 1e6 + 1.0}]  # fmt: skip
    found = list(events(fates))
    names = {each["pid"]: each["args"]["name"] for each in found if each["ph"] == "M"}
    assert names == {0: "class chat, engine 0", 1: "class job, engine 1"}
    (span,) = [each for each in found if each["name"] == "b"]
    assert (span["pid"], span["ts"]) == (1, 0)
    assert {each["pid"] for each in found if each["ph"] == "C"} == {0, 1}


def test_the_report_names_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from html_report import Report

    late = a_fate("late", "chat", **LATE, num_overtook=1) | {"engine": 1}
    other = a_fate("other", "job", arrival_s=10.5, started_s=11.0) | {"engine": 0}
    window = Window([other, late], None)

    one = Report(write(window, [late], "", None, tmp_path / "one.html"))
    assert "Class chat, engine 1." in one.text
    assert "None of the requests that are known arrived later" in one.text
    whole = Report(write(window, [], of_all(window), None, tmp_path / "all.html"))
    assert whole.tables[0][1][:2] == ["late", "chat, engine 1"]
    assert one.problems == whole.problems == []
