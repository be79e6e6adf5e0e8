"""The traffic under which the scheduler's own cost is measured, and what is printed of it."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.command import main
from registry import EXPERIMENTS
from scheduler.closed_loop import KINDS, ClosedLoop, Load, requests
from scheduler.parts import PARTS, TimedSola
from sola_sched.vllm_adapter.scheduler import Scheduler as SolaScheduler

pytestmark = [pytest.mark.vllm]


def stepped(scheduler_cls, load, num_steps):
    """An engine after so many steps, and what each of them scheduled."""
    engine = ClosedLoop(scheduler_cls, load, 0)
    scheduled, step = [], engine.step

    def noted():
        trace = step()
        if trace is not None:
            scheduled.append(dict(trace.output.num_scheduled_tokens))
        return trace

    engine.step = noted
    for _ in range(num_steps):
        engine.advance()
    return engine, scheduled


@pytest.mark.parametrize("is_async", [True, False])
def test_when_a_request_ends_the_next_one_arrives(is_async):
    load = Load(is_async=is_async, num_running=8, num_waiting=3)

    engine, _ = stepped(TimedSola, load, 220)

    ended = sum(record.finish_reason is not None for record in engine.records)
    assert ended > 5
    assert len(engine.records) - ended == 11
    assert len(engine.times_ns) == len(engine.parts_ns) == 220
    for (cpu_ns, wall_ns), parts_ns in zip(engine.times_ns, engine.parts_ns, strict=True):
        assert cpu_ns > 0
        assert set(parts_ns) <= set(PARTS)
        assert 0 < sum(parts_ns.values()) - parts_ns.get("arrivals", 0) <= wall_ns
    assert {part for step in engine.parts_ns for part in step} == set(PARTS)


@pytest.mark.parametrize("is_async", [True, False])
def test_observing_changes_no_step(is_async):
    load = Load("observe", is_async=is_async, num_running=8, num_waiting=3)

    _, stock = stepped(AsyncScheduler if is_async else Scheduler, load, 120)
    _, ours = stepped(SolaScheduler, load, 120)

    assert len(stock) >= 120
    assert stock == ours


def test_no_request_finds_the_prefix_of_another_one_cached():
    engine, _ = stepped(AsyncScheduler, Load(num_running=8), 200)

    stats = engine.scheduler.kv_cache_manager.prefix_cache_stats
    assert engine.scheduler.kv_cache_manager.enable_caching
    assert stats is None or stats.hits == 0


def test_requests_follow_from_the_seed_and_the_kind():
    def lengths(kind, seed=0):
        drawn = requests(KINDS[kind], random.Random(seed))
        return [request.num_prompt_tokens for request in islice(drawn, 200)]

    chat = lengths("chat")
    assert chat == lengths("chat")
    assert chat != lengths("chat", 1)
    assert sum(chat) / 200 == pytest.approx(220.0, rel=0.4)
    assert sum(lengths("long")) / 200 == pytest.approx(5000.0, rel=0.2)


def test_the_table_of_an_experiments_rows_has_every_label(tmp_path, capsys):
    options = ["--kinds", "chat", "--modes", "async", "--num-running", "2", "--num-steps", "20"]
    for label in ("before", "after"):
        argv = ["overhead", *options, "--label", label, "--results", str(tmp_path)]
        assert main(EXPERIMENTS, argv) == 0
    capsys.readouterr()

    assert main(EXPERIMENTS, ["overhead", "--stored", "--results", str(tmp_path)]) == 0

    rows = [json.loads(line) for line in (tmp_path / "overhead.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["before", "after"]
    for row in rows:
        assert row["versions"]["numpy"]
        assert {"commit", "load_average", "date", "parts_us"} <= set(row)
        assert row["cpu_added_us"]["median"] == pytest.approx(
            row["cpu_ours_us"]["median"] - row["cpu_stock_us"]["median"]
        )
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "added us, before" in head
    assert "added us, after" in head
    assert lines[0].startswith("| attain | chat | async | plain | 2 | 0 | 2 |")
