"""The traffic under which the scheduler's own cost is measured: both serve all of it."""

from __future__ import annotations

from types import ModuleType

import pytest
from scripts import load_script

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("scheduler", "bench_traffic")


def test_both_schedulers_serve_the_same_arrivals(bench, monkeypatch):
    engines = []
    build = bench.TrafficEngine.__init__

    def remember(engine, *args):
        build(engine, *args)
        engines.append(engine)

    monkeypatch.setattr(bench.TrafficEngine, "__init__", remember)

    stock, ours = bench.measure("attain", "llama-3-8b-a100", num_requests=60, seed=1)

    records = [engine.records for engine in engines]
    assert [len(each) for each in records] == [60, 60]
    assert all(r.finish_reason == "length" for each in records for r in each)
    arrivals = [[r.arrival_s for r in each] for each in records]
    assert arrivals[0] == arrivals[1]
    for served in (stock, ours):
        assert served.num_steps > 50
        assert served.cpu_s > 0.0
        # What is counted lies between the first fifth of the arrivals and the last one.
        assert served.duration_s == pytest.approx(arrivals[0][-1] - arrivals[0][12], abs=0.2)


def test_observing_changes_no_step(bench, monkeypatch):
    steps = {}
    step = bench.TrafficEngine.step

    def remember(engine):
        trace = step(engine)
        if trace is not None:
            scheduled = dict(trace.output.num_scheduled_tokens)
            steps.setdefault(id(engine.scheduler), []).append(scheduled)
        return trace

    monkeypatch.setattr(bench.TrafficEngine, "step", remember)

    bench.measure("observe", "llama-3-8b-a100", num_requests=40, seed=2)

    stock, ours = steps.values()
    assert len(stock) > 50
    assert stock == ours


def test_arrivals_follow_from_the_seed(bench):
    first, again, other = (bench.traffic(10.0, 200, seed) for seed in (0, 0, 1))

    assert first == again
    assert first != other
    assert first[-1].arrival_s == pytest.approx(20.0, rel=0.2)
    lengths = [request.num_prompt_tokens for request in first]
    assert sum(lengths) / len(lengths) == pytest.approx(220.0, rel=0.4)
