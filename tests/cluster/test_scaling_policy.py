"""Eq. 7 as a policy of Ray Serve's autoscaler: what it is told, and what it answers."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ruptures")

from sola_sched.errors import ConfigError
from sola_sched.serving.arrivals import ARRIVED
from sola_sched.serving.scaling import ScalingPolicy

#: A replica for each 5 requests/s; with the margin of 5 %, 1 up to 4.7/s, 2 up to 9.5/s.
LAW: dict[str, Any] = {"rates_per_s": [5, 10], "replicas": [1, 2]}
WINDOW_S = 10.0
START_S = 1.0e9


class Fleet:
    """Replicas that count what comes to them, and report each second: what Serve shows of them.

    Args:
        policy: Is asked ten times a second.
        names: Of the replicas.
    """

    def __init__(self, policy: ScalingPolicy, *names: str) -> None:
        self.policy, self.now_s, self.target = policy, START_S, 1
        self.metrics: dict[str, list[Any]] = {}
        self.totals: dict[str, float] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        """A replica is there that has got nothing yet."""
        self.totals[name] = 0.0
        self.metrics[name] = []

    def leave(self, name: str) -> None:
        """A replica is gone."""
        del self.totals[name], self.metrics[name]

    def report(self, name: str) -> None:
        """Serve gets the counts of the last ten seconds: another list, as from the real one."""
        new = SimpleNamespace(timestamp=self.now_s, value=self.totals[name])
        kept = [p for p in self.metrics[name] if p.timestamp > self.now_s - WINDOW_S]
        self.metrics[name] = [*kept, new]

    def ask(self) -> int:
        """The policy's answer now."""
        context = SimpleNamespace(
            target_num_replicas=self.target,
            raw_metrics={ARRIVED: {k: v for k, v in self.metrics.items() if v}},
            current_time=self.now_s,
            config=SimpleNamespace(look_back_period_s=WINDOW_S),
            running_replicas=list(self.metrics),
        )
        self.target, state = self.policy(context)
        assert state == {}
        return self.target

    def run(self, seconds: int, rate_per_s: float, *, silent: tuple[str, ...] = ()) -> list[int]:
        """Requests come evenly to all replicas; the answer of each second."""
        answers = []
        for tick in range(10 * seconds):
            self.now_s += 0.1
            for place, name in enumerate(self.totals):
                self.totals[name] += 0.1 * rate_per_s / len(self.totals)
                if tick % 10 == place % 10 and name not in silent:  # each at another time
                    self.report(name)
            self.ask()
            if tick % 10 == 9:
                answers.append(self.target)
        return answers


def make_policy(**options: Any) -> ScalingPolicy:
    return ScalingPolicy(**LAW, **{"down_delay_s": 20.0, "window": 60} | options)


def test_before_anything_is_counted_the_number_stays() -> None:
    fleet = Fleet(make_policy(), "a")
    fleet.target = 7

    assert [fleet.ask() for _ in range(3)] == [7, 7, 7]


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": []}}, {ARRIVED: {}}])
def test_without_our_metric_the_number_stays(metrics: Any) -> None:
    context = SimpleNamespace(
        target_num_replicas=3,
        raw_metrics=metrics,
        current_time=START_S,
        config=SimpleNamespace(look_back_period_s=WINDOW_S),
    )

    assert make_policy()(context) == (3, {})


def test_a_steady_rate_has_the_replicas_of_the_law() -> None:
    fleet = Fleet(make_policy(), "a", "b", "c")

    assert set(fleet.run(60, 18.0)[3:]) == {4}
    assert fleet.policy.num_ignored == 0


def test_a_risen_rate_is_followed_within_ten_heartbeats_and_the_old_one_forgotten() -> None:
    fleet = Fleet(make_policy(), "a", "b")
    assert set(fleet.run(40, 8.0)[3:]) == {2}

    answers = fleet.run(20, 40.0)

    # A mean over all 60 s would ask for 4; what counts is the rate since the change point.
    assert answers[10:] == [9] * 10
    assert answers[0] == 2


def test_a_fallen_rate_is_followed_after_the_delay() -> None:
    fleet = Fleet(make_policy(), "a", "b")
    fleet.run(40, 18.0)

    answers = fleet.run(60, 4.0)

    # The delay, and what it takes to see that the rate has changed: first in part, then in whole.
    assert answers == sorted(answers, reverse=True)
    assert 20 <= answers.count(4) <= 35
    assert answers.index(1) <= 40


def test_a_short_lull_takes_no_replica_away() -> None:
    fleet = Fleet(make_policy(), "a", "b")
    fleet.run(40, 18.0)

    assert set(fleet.run(12, 4.0) + fleet.run(40, 18.0)) == {4}


def test_random_arrivals_do_not_make_it_swing() -> None:
    policy, rng = make_policy(margin_ratio=0.2), np.random.default_rng(3)
    fleet = Fleet(policy, "a", "b")

    answers = [fleet.run(1, float(rng.poisson(17.0)))[0] for _ in range(200)]

    assert set(answers[20:]) <= {4, 5}


def test_what_runs_is_kept_when_a_policy_begins_anew() -> None:
    fleet = Fleet(make_policy(), "a")
    fleet.target = 6

    answers = fleet.run(40, 4.0)

    assert set(answers[:20]) == {6}
    assert answers[-1] == 1


def test_a_replica_that_joins_or_leaves_changes_no_rate() -> None:
    fleet = Fleet(make_policy(), "a", "b")
    fleet.run(30, 18.0)

    fleet.join("c")
    joined = fleet.run(20, 18.0)
    fleet.leave("a")
    left = fleet.run(40, 18.0)

    assert set(joined) == {4}
    assert set(left) == {4}


def test_all_replicas_are_replaced_and_the_gap_is_no_lull() -> None:
    fleet = Fleet(make_policy(down_delay_s=2.0), "a", "b")
    fleet.run(30, 18.0)

    fleet.leave("a"), fleet.leave("b")
    fleet.run(30, 0.0)
    fleet.join("c"), fleet.join("d")

    assert set(fleet.run(30, 18.0)) == {4}


def test_a_silent_replica_holds_nothing_up_for_long() -> None:
    fleet = Fleet(make_policy(), "a", "b")
    fleet.run(30, 8.0)

    answers = fleet.run(30, 80.0, silent=("b",))

    assert answers[5] == 2  # not all have told
    assert answers[-1] == 9  # half of the requests, those of the replica that tells


@pytest.mark.parametrize(
    ("off_s", "has_told"), [(-3600.0, True), (3600.0, True), (None, True), (None, False)]
)
def test_no_replica_goes_while_the_counts_of_one_cannot_be_used(
    off_s: float | None, has_told: bool
) -> None:
    """It has its share of the requests, whatever its clock says, or if it says nothing."""
    fleet = Fleet(make_policy(), "a", "b", "c")
    assert set(fleet.run(40, 18.0)[3:]) == {4}

    answers = []
    for _ in range(90):
        if off_s is not None:
            new = SimpleNamespace(timestamp=fleet.now_s + off_s, value=0.0)
            fleet.metrics["c"] = [new]
        elif not has_told:
            fleet.metrics["c"] = []
        answers += fleet.run(1, 18.0, silent=("c",))
    fleet.metrics["c"] = []
    again = fleet.run(30, 18.0)
    lower = fleet.run(60, 4.0)

    assert set(answers) == {4}
    assert set(again) == {4}  # nor when they can be used again
    assert lower[-1] == 1


def _points(*pairs: tuple[Any, Any]) -> list[Any]:
    return [SimpleNamespace(timestamp=time_s, value=value) for time_s, value in pairs]


@pytest.mark.parametrize(
    "wrong",
    [
        _points((START_S + 1.0, 9.0), (START_S + 2.0, 5.0)),
        _points((START_S + 1.0, math.nan)),
        _points((START_S + 1.0, -1.0)),
        _points((START_S + 1.0, math.inf)),
        _points((math.nan, 1.0)),
        _points((START_S + 1.0, "many")),
        _points((START_S + 1.0, None)),
        _points((START_S - 3600.0, 1.0)),
        _points((START_S + 3600.0, 1.0)),
        ["nonsense"],
    ],
)
def test_nonsense_is_ignored_and_counted_once(
    wrong: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(make_policy(), "a", "b")
    fleet.metrics["b"] = wrong

    with caplog.at_level(logging.WARNING):
        answers = fleet.run(30, 16.0, silent=("b",))

    assert answers[-1] == 2  # the 8/s of the other
    assert fleet.policy.num_ignored == 1
    assert "replica b is ignored" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"windw": 20}, "windw"),
        ({"max_instances": 3}, "Serve's 'min_replicas' and 'max_replicas'"),
        ({"heartbeat_s": 0.0}, "'heartbeat_s' must be finite and > 0"),
        ({"window": 3}, "'window' must be >= 10"),
        ({"down_delay_s": -1.0}, "'down_delay_s' must be finite and >= 0"),
        ({"replicas": [1, 0]}, "instances >= 1"),
        ({"rates_per_s": [5, 5]}, "two different rates"),
    ],
)
def test_wrong_arguments_say_what_must_hold(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ScalingPolicy(**LAW | arguments)


def test_a_missing_ruptures_is_said_before_serves_control_loop_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)

    with pytest.raises(ConfigError, match="ruptures"):
        make_policy()
