"""The traffic under which the scheduler's own cost is measured, and what is printed of it."""

from __future__ import annotations

import json
import random
import sys
from itertools import islice

import pytest

pytest.importorskip("vllm")

from harness.command import main
from registry import EXPERIMENTS
from scheduler import bench_overhead as bench

pytestmark = [pytest.mark.vllm]


@pytest.fixture
def engines(monkeypatch):
    """The engines that are built from now on, with what each of their steps scheduled."""
    built = []
    build, step = bench.ClosedLoop.__init__, bench.ClosedLoop.step

    def remember(engine, *args):
        engine.scheduled = []
        built.append(engine)
        build(engine, *args)

    def remember_step(engine):
        trace = step(engine)
        if trace is not None:
            engine.scheduled.append(dict(trace.output.num_scheduled_tokens))
        return trace

    monkeypatch.setattr(bench.ClosedLoop, "__init__", remember)
    monkeypatch.setattr(bench.ClosedLoop, "step", remember_step)
    return built


@pytest.mark.parametrize("is_async", [True, False])
def test_when_a_request_ends_the_next_one_arrives(engines, is_async):
    load = bench.Load(is_async=is_async, num_running=8, num_waiting=3)

    row = bench.measure(load, num_steps=200, num_warmups=20)

    for engine in engines:
        ended = sum(record.finish_reason is not None for record in engine.records)
        assert ended > 5
        assert len(engine.records) - ended == 11
        assert len(engine.times_ns) == 200
        assert all(cpu_ns > 0 for cpu_ns, _ in engine.times_ns)
    assert 0 < row["mean_running"] <= 8
    assert row["cpu_added_us"]["median"] == pytest.approx(
        row["cpu_ours_us"]["median"] - row["cpu_stock_us"]["median"]
    )


@pytest.mark.parametrize("is_async", [True, False])
def test_observing_changes_no_step(engines, is_async):
    load = bench.Load("observe", is_async=is_async, num_running=8, num_waiting=3)

    bench.measure(load, num_steps=100, num_warmups=20)

    stock, ours = engines
    assert len(stock.scheduled) >= 120
    assert stock.scheduled == ours.scheduled


def test_requests_follow_from_the_seed_and_the_kind():
    def lengths(kind, seed=0):
        drawn = bench.requests(bench.KINDS[kind], random.Random(seed))
        return [request.num_prompt_tokens for request in islice(drawn, 200)]

    chat = lengths("chat")
    assert chat == lengths("chat")
    assert chat != lengths("chat", 1)
    assert sum(chat) / 200 == pytest.approx(220.0, rel=0.4)
    assert sum(lengths("long")) / 200 == pytest.approx(5000.0, rel=0.2)


def test_rows_are_stored_with_their_circumstances_and_printed_again(tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"
    options = ["--kinds", "chat", "--modes", "async", "--num-running", "2", "--num-steps", "20"]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--out", str(out), "--label", "now"])
    bench.main()
    printed = capsys.readouterr().out

    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["versions"]["numpy"]
    assert row["cpu"]
    assert {"commit", "load_average", "date"} <= set(row)
    monkeypatch.setattr(sys, "argv", ["bench", "--table", str(out), "--label", "now"])
    bench.main()
    assert capsys.readouterr().out == printed
    assert printed.splitlines()[2].startswith("| attain | chat | async | 2 | 0 | 2 |")
    monkeypatch.setattr(sys, "argv", ["bench", "--table", str(out), "--compare", "now", "then"])
    bench.main()
    line = capsys.readouterr().out.splitlines()[2]
    assert line.startswith("| attain | chat | async | 2 | 0 |")
    assert line.endswith("% |  |  |  |")


def test_the_table_of_an_experiments_rows_has_every_label(tmp_path, capsys):
    options = ["--kinds", "chat", "--modes", "async", "--num-running", "2", "--num-steps", "20"]
    for label in ("before", "after"):
        argv = ["overhead", *options, "--label", label, "--results", str(tmp_path)]
        assert main(EXPERIMENTS, argv) == 0
    capsys.readouterr()

    assert main(EXPERIMENTS, ["overhead", "--stored", "--results", str(tmp_path)]) == 0

    assert len((tmp_path / "overhead.jsonl").read_text().splitlines()) == 2
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "added us, before" in head
    assert "added us, after" in head
    assert lines[0].startswith("| attain | chat | async | 2 | 0 |")
