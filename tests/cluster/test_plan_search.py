"""The search of `plan` for the cheapest that attains, on evaluations by formula."""

from __future__ import annotations

import math

import pytest

from sola_sched.plan.search.cheapest import search
from sola_sched.plan.search.configurations import Configuration, configurations
from sola_sched.plan.search.evaluate import Outcome, excess


class Made:
    """An evaluation by formula: what a place is worth, and what was asked."""

    def __init__(self, needed: float, **speeds: float) -> None:
        self.needed, self.speeds = needed, speeds
        self.num_runs = 0

    def __call__(self, c: Configuration) -> Outcome:
        self.num_runs += 1
        speed = {"a100": 1.0, "h100": 2.0}[c.gpu]
        for name in (
            c.spec.kind,
            c.router,
            f"chunk{c.max_num_batched_tokens}",
            f"seqs{c.max_num_seqs}",
        ):
            speed *= self.speeds.get(name, 1.0)
        share = min(1.0, c.num_instances * speed / self.needed)
        if c.num_prefill:
            share = self.prefill_share(c) * min(
                1.0, c.num_instances * speed * self.speeds.get("decode", 0.0) / self.needed
            )
        met = {"ttft": share, "tpot": share}
        return Outcome(c, share, met, (1.0, 1.0), (1.0, 1.0), {"ttft": 1.0, "tpot": 1.0})

    def prefill_share(self, c: Configuration) -> float:
        self.num_runs += 1
        return min(1.0, c.num_prefill / 2)


def best_of(evaluate: Made, **changes: list) -> Configuration:
    options = {
        "model": "llama-3-8b", "prices": {"a100": 1.0, "h100": 1.5}, "degrees": [1],
        "schedulers": ["sola", "stock"], "max_num_seqs": [256], "routers": ["least-ttft"],
    } | changes  # fmt: skip
    outcomes = search(configurations(**options), evaluate, 1.0, 64, has_pools=True)
    costs = [o.configuration.cost_per_hour for o in outcomes]
    assert costs == sorted(costs)
    return next(o for o in outcomes if o.attainment >= 1.0).configuration


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13])
def test_the_search_finds_the_least_number_and_the_cheaper_of_two(needed: int) -> None:
    best = best_of(Made(needed, stock=0.6))

    expected = min((needed * 1.0, "a100"), (math.ceil(needed / 2) * 1.5, "h100"))
    assert (best.cost_per_hour, best.gpu) == expected
    assert best.scheduler == "sola"


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ({"stock": 1.3}, {"scheduler": "stock:512"}),
        ({"chunk512": 1.3}, {"max_num_batched_tokens": 512}),
        ({"seqs512": 1.3}, {"max_num_seqs": 512}),
        ({"shortest-queue": 1.3}, {"router": "shortest-queue"}),
        ({"decode": 1.5}, {"num_prefill": 2}),
    ],
)
def test_the_search_finds_the_option_that_saves_instances(
    speeds: dict[str, float], found: dict[str, object]
) -> None:
    evaluate = Made(20, **speeds)

    best = best_of(
        evaluate, schedulers=["sola", "sola:512", "stock:512"], max_num_seqs=[256, 512],
        routers=["least-ttft", "shortest-queue"],
    )  # fmt: skip

    assert {name: getattr(best, name) for name in found} == found
    assert best.cost_per_hour < 15.0
    assert evaluate.num_runs < 80


def test_a_router_or_slots_that_nothing_needs_are_not_paid_for() -> None:
    assert best_of(Made(4), max_num_seqs=[256, 512], routers=["least-ttft", "packing"]) == (
        best_of(Made(4))
    )


def test_the_excess_is_the_factor_that_the_share_asked_for_needs() -> None:
    assert excess([1.0, 2.0, 3.0, 10.0], [2.0] * 4, 0.75) == 1.5
    assert excess([1.0, 2.0, 3.0, 10.0], [2.0] * 4, 1.0) == 5.0
