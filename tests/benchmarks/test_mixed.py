"""Mixes of requests: how they are drawn, and what each rule is told of them."""

from __future__ import annotations

import pytest

from mixed.experiment import Case, _as_run, run_case
from mixed.mixes import MIXES, Kind, Mix, due_s, mixed_workload
from sola_sched.config.slo import SloTarget
from sola_sched.planner.attain import AttainTuning, records
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import RequestSpec, Workload

LIMITS = ModelLimits(max_model_len=2048, vocab_size=1000)


def drawn(name: str, num_requests: int = 1000) -> Workload:
    return mixed_workload(MIXES[name], LIMITS, None, num_requests, 0)


@pytest.mark.parametrize("name", MIXES)
def test_kinds_come_by_their_shares_with_their_targets(name: str) -> None:
    requests = drawn(name).requests
    for kind_name, kind in MIXES[name].kinds.items():
        own = [r for r in requests if r.slo_class == kind_name]
        assert len(own) / len(requests) == pytest.approx(kind.share, abs=0.06)
        assert {(r.slo, r.priority) for r in own} == {(kind.slo, kind.rank)}
    assert all(len(r.prompt_token_ids) + r.output_tokens <= 2048 for r in requests)
    assert requests[-1].arrival_s == pytest.approx(1000 / MIXES[name].rate_per_s)


def test_a_long_kind_is_ten_times_as_long_as_the_context_allows() -> None:
    requests = drawn("ten times as long").requests
    mean = {
        name: sum(r.output_tokens for r in requests if r.slo_class == name)
        / sum(r.slo_class == name for r in requests)
        for name in ("short", "long")
    }
    assert 5.0 < mean["long"] / mean["short"] < 11.0


def test_deadlines_are_priorities_within_the_strict_ranks() -> None:
    mix = MIXES["strict"]
    spec, edf = _as_run(mix, "edf:512", drawn("strict"))
    assert spec.engine_args == {"max_num_batched_tokens": 512, "scheduling_policy": "priority"}
    order = sorted(edf.requests, key=lambda r: r.priority)
    ranks = [mix.kinds[str(r.slo_class)].rank for r in order]
    assert ranks == sorted(ranks)
    for rank in set(ranks):
        dues = [due_s(r) for r, each in zip(order, ranks, strict=True) if each == rank]
        assert dues == pytest.approx(sorted(dues), abs=1e-3)

    spec, plain = _as_run(MIXES["40/40/20"], "stock:512", drawn("40/40/20", 100))
    assert "scheduling_policy" not in spec.engine_args
    assert {r.priority for r in plain.requests} == {0}


@pytest.mark.parametrize(
    ("slo", "due"),
    [
        (SloTarget(2.0, 0.1), 12.0),
        (SloTarget(e2e_s=600.0), 610.0),
        (SloTarget(6.0, e2e_s=600.0), 16.0),
        (SloTarget(tpot_s=0.2), 1e6 + 10.0),
    ],
)
def test_a_request_is_due_with_its_first_deadline(slo: SloTarget, due: float) -> None:
    assert due_s(RequestSpec("0", (1,), 1, 10.0, slo)) == due


def test_a_class_that_nobody_can_serve_costs_no_other_its_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes whose TPOT is shorter than any step are lost at once, and hold nobody up."""
    kinds = {
        "impossible": Kind(0.5, SloTarget(2.0, 0.005)),
        "usual": Kind(0.5, SloTarget(1.0, 0.1)),
    }
    monkeypatch.setitem(MIXES, "impossible", Mix("", kinds, 4.0))

    def attained() -> float:
        row = run_case(Case("impossible", "sola", 200, 0), None)
        return float(row["classes"]["usual"]["attainment"])

    assert attained() > 0.9
    without = AttainTuning(decode_margin=0.0)
    monkeypatch.setattr(records, "AttainTuning", lambda: without)
    assert attained() < 0.5, "without the rule"
