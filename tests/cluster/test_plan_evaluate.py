"""What a choice of `plan` attains in the fast engine, also with prefill and decode apart."""

from __future__ import annotations

import math

import pytest

from sola_sched.cluster.routers import RoundRobin
from sola_sched.config.slo import SloTarget
from sola_sched.plan.inputs.load import Load
from sola_sched.plan.search import evaluate
from sola_sched.plan.search.configurations import configurations
from sola_sched.plan.search.evaluate import run_fast
from sola_sched.plan.search.impossible import ImpossibleError, require_possible
from sola_sched.simulator.steps.time import DecodeOnly, StepCounts
from sola_sched.workloads.workload import RequestSpec, Workload


def make(num_requests: int = 40, **targets: float) -> Load:
    """Requests of 1,000 + 200 tokens, ten a second."""
    requests = tuple(
        RequestSpec(f"r{i}", (1,) * 1000, 200, arrival_s=0.1 * i) for i in range(num_requests)
    )
    return Load(Workload(requests, request_rate=10.0), SloTarget(**targets), ())


def test_an_answer_in_the_time_to_the_last_token_is_planned_for(tmp_path, capsys) -> None:
    load = make(ttft_s=1.0, tpot_s=0.06, e2e_s=1.0)
    choice = configurations(
        "llama-3-8b", {"h100": 3.0}, [1], ["sola"], [256], ["least-ttft"]
    )[0]  # fmt: skip

    found = run_fast("llama-3-8b", choice, load, 0, 0.9)

    assert set(found.met) == {"ttft", "tpot", "e2e"}
    assert found.worst == "e2e"
    assert found.excess["e2e"] > 1.0
    with pytest.raises(ImpossibleError, match="the e2e target must be at least"):
        require_possible("llama-3-8b", [choice], load, 0.9)


def test_a_decode_pool_computes_no_prompt() -> None:
    class Steps:
        def seconds(self, counts: StepCounts) -> float:
            assert not counts.num_prefills
            return counts.num_decodes + counts.decode_ctx / 1000

    assert DecodeOnly(Steps()).seconds(StepCounts(3, 500, 1, 2000, 1e6)) == 6.5


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_pools_answer_every_request_once_and_in_order(num_prefill: int) -> None:
    load = make(ttft_s=1.0, tpot_s=0.06)
    choice = configurations(
        "llama-3-8b", {"a100": 1.5}, [1], ["stock:8192"], [256], ["least-ttft"]
    )[0]  # fmt: skip

    both = run_fast("llama-3-8b", choice.times(1), load, 0, 0.95)
    split = run_fast("llama-3-8b", choice.times(1, num_prefill), load, 0, 0.95)

    assert split.attainment == 1.0
    # No prompt delays a decode, and decodes delay no prompt.
    assert split.tpot_ms[1] < both.tpot_ms[1]
    assert split.ttft_ms[0] < both.ttft_ms[0]
    assert choice.times(1, num_prefill).cost_per_hour == 1.5 * (1 + num_prefill)


def test_what_ends_with_its_first_token_needs_no_decode_pool_and_has_no_tpot() -> None:
    requests = tuple(RequestSpec(f"r{i}", (1,) * 1000, 1, arrival_s=0.1 * i) for i in range(20))
    load = Load(Workload(requests, request_rate=10.0), SloTarget(1.0, 0.06), ())
    choice = configurations(
        "llama-3-8b", {"a100": 1.5}, [1], ["stock:8192"], [256], ["least-ttft"]
    )[0]  # fmt: skip

    split = run_fast("llama-3-8b", choice.times(1, 1), load, 0, 0.95)

    assert split.attainment == 1.0
    assert all(map(math.isnan, split.tpot_ms))
    assert split.ttft_ms[1] > split.ttft_ms[0] > 0.0


def test_times_per_token_are_those_of_requests_that_have_some() -> None:
    requests = tuple(
        RequestSpec(f"r{i}", (1,) * 1000, 1 if i % 3 else 50, arrival_s=float(i)) for i in range(20)
    )
    load = Load(Workload(requests, request_rate=1.0), SloTarget(1.0, 0.06), ())
    choice = configurations(
        "llama-3-8b", {"a100": 1.5}, [1], ["stock:8192"], [256], ["least-ttft"]
    )[0]  # fmt: skip

    assert run_fast("llama-3-8b", choice.times(1), load, 0, 0.95).tpot_ms[0] > 1.0


@pytest.mark.parametrize(("scheduler", "reports"), [("stock:2048", False), ("sola:2048", True)])
def test_servers_of_stock_vllm_tell_a_gateway_nothing(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, reports: bool
) -> None:
    seen = []

    class Router(RoundRobin):
        def choose(self, request, views, now_s):  # type: ignore[no-untyped-def]
            seen.extend(views)
            return super().choose(request, views, now_s)

    monkeypatch.setitem(evaluate.ALL_ROUTERS, "round-robin", lambda seed: Router())
    choice = configurations("llama-3-8b", {"a100": 1.5}, [1], [scheduler], [256], ["round-robin"])

    run_fast("llama-3-8b", choice[0].times(2), make(ttft_s=1.0), 0, 0.95)

    assert any(view.num_running for view in seen) is reports
    assert any(view.kv_used_tokens for view in seen) is reports
    assert max(view.num_waiting for view in seen) > 0


def test_requests_that_a_pool_cannot_hold_fail_and_are_counted() -> None:
    too_long = RequestSpec("long", (1,) * 9000, 5, arrival_s=0.5)
    few = make(4, ttft_s=1.0, tpot_s=0.06).workload.requests
    load = Load(Workload((*few, too_long), request_rate=1.0), SloTarget(1.0, 0.06), ())
    choice = configurations(
        "llama-3-8b", {"a100": 1.5}, [1], ["stock:8192"], [256], ["least-ttft"]
    )[0]  # fmt: skip

    found = run_fast("llama-3-8b", choice.times(1, 1), load, 0, 0.95)

    assert found.attainment == 0.75  # the first of five is not counted
    assert found.excess["ttft"] == math.inf
