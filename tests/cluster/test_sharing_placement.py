"""Services, placements, Algorithm 1 and its gap to the best placement, replacement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from shared_services import Queueing, fits, make_problem, make_service

from sola_sched.cluster.sharing.allocation import allocate, least_degree, partition
from sola_sched.cluster.sharing.exhaustive import placements, search_exhaustively
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement, check, gpus_of
from sola_sched.cluster.sharing.replacement import (
    Replacement,
    changes,
    next_interval_s,
)
from sola_sched.cluster.sharing.search import Problem, search
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.unserved import Score, ServiceOutcome, score, unserved_index
from sola_sched.errors import ConfigError, InfeasibleError


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"rate": 0.0}, "'rate' of service 'a' must be a number > 0"),
        ({"rate": math.nan}, "'rate' of service 'a' must be a number > 0"),
        ({"rate": math.inf}, "'rate' of service 'a' must be a number > 0"),
        ({"slo_scale": -5.0}, "'slo_scale' of service 'a' must be a number > 0"),
        ({"lengths": []}, "'lengths' of service 'a' must hold at least one"),
        ({"lengths": [(10, 0)]}, "must be pairs of prompt and output tokens"),
        ({"lengths": [(math.nan, 3)]}, "must be pairs of prompt and output tokens"),
        ({"name": ""}, "'name' of a service must not be empty"),
    ],
)
def test_service_with_bad_value_is_refused(changed: dict[str, object], match: str) -> None:
    values = {"name": "a", "model": "small", "rate": 1.0, "lengths": [(1, 1)]} | changed

    with pytest.raises(ConfigError, match=match):
        Service(**values)  # type: ignore[arg-type]


def test_two_services_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be unique"):
        by_name([make_service("a"), make_service("a")])


def test_unserved_index_counts_misses_before_latency() -> None:
    slow = ServiceOutcome(10, 2, 500.0)
    missing = ServiceOutcome(10, 3, 1.0)

    assert unserved_index(slow) == pytest.approx(2.05)
    assert unserved_index(missing) > unserved_index(slow)


def test_score_prefers_attainment_then_latency() -> None:
    better = score({"a": ServiceOutcome(10, 1, 30.0)})

    assert better == Score(0.1, 3.0)
    assert better < score({"a": ServiceOutcome(10, 2, 10.0)})
    assert better < score({"a": ServiceOutcome(10, 1, 31.0)})


def test_groups_are_merged_for_services_that_need_more() -> None:
    services = [make_service("a", "big"), make_service("b", "big"), make_service("c")]

    alone = partition(services, Cluster.of(8), 1, 1, fits)
    shared = partition(services, Cluster.of(8), 1, 2, roomy_fits)

    assert [group.degree for group in alone] == [2, 2, 1, 1, 1, 1]
    assert [group.degree for group in shared] == [2, 1, 1, 1, 1, 1, 1]


def roomy_fits(degree: int, services: Sequence[Service]) -> bool:
    return degree >= 2 or fits(degree, services)


def test_service_that_fits_nowhere_is_named() -> None:
    huge = Service("h", "big", 1.0, [(10, 10)])

    with pytest.raises(InfeasibleError, match="service 'h' must fit on the GPUs of a node"):
        least_degree(huge, Cluster(4, 1), fits)


def test_too_few_gpus_for_the_large_ones_are_an_error_with_numbers() -> None:
    services = [make_service(name, "big") for name in "abc"]

    with pytest.raises(InfeasibleError, match="4 GPUs must hold the services that need more"):
        partition(services, Cluster.of(4), 1, 1, fits)


def test_large_service_keeps_its_merged_group() -> None:
    services = by_name(
        [make_service("a", "small", 9.0), make_service("b", "small", 8.0),
         make_service("z", "big", 0.1)]
    )  # fmt: skip
    groups = partition(list(services.values()), Cluster.of(4), 1, 1, fits)

    _, placement = allocate(
        services, groups, 1, fits, Queueing(list(services.values())), Cluster.of(4)
    )

    assert placement.unplaced(list(services)) == []
    assert placement.groups[0] == Group(2, ("z",))


def test_busy_service_gets_replicas() -> None:
    services = [make_service("busy", rate=25.0), make_service("idle", rate=0.5)]

    found = search(make_problem(services, 4))

    busy = found.placement.groups_of("busy")
    assert sum(found.placement.groups[i].degree for i in busy) >= 3
    assert found.score.missed < 0.05


def test_search_shares_where_there_are_more_services_than_gpus() -> None:
    services = [make_service(name) for name in "abc"]

    found = search(make_problem(services, 2))

    assert found.most_sharing == 2
    assert found.placement.unplaced(["a", "b", "c"]) == []


def test_search_without_room_for_all_says_so() -> None:
    services = [make_service(name) for name in "abc"]

    with pytest.raises(InfeasibleError, match="must have a place for all 3 services"):
        search(make_problem(services, 1))


def test_processes_find_the_same_placement() -> None:
    services = [
        make_service(name, rate=rate) for name, rate in zip("abcd", (9, 4, 2, 1), strict=True)
    ]

    assert search(make_problem(services, 4), 2) == search(make_problem(services, 4))


def test_exhaustive_search_counts_placements_up_to_symmetry() -> None:
    # Two GPUs, one service: {1, 1} with none, one or two of them serving, {2} with or without.
    problem = make_problem([make_service("a")], 2)

    found = set(placements(problem))

    assert len(found) == 5


def small_problems() -> Iterator[Problem]:
    for num_gpus, num_big in itertools.product((2, 4), (0, 1)):
        for rates in itertools.combinations_with_replacement((0.5, 2.0, 6.0, 15.0), 3):
            services = [
                make_service(f"s{i}", "big" if i < num_big else "small", rate)
                for i, rate in enumerate(rates)
            ]
            if num_gpus > 2 or not num_big:
                yield make_problem(services, num_gpus)


def test_algorithm_one_is_near_the_best_placement() -> None:
    gaps = []
    for problem in small_problems():
        best = search_exhaustively(problem)

        found = search(problem)

        check(found.placement, by_name(problem.services), problem.cluster, fits)
        assert best.score <= found.score
        gaps.append(found.score.missed - best.score.missed)
    print(f"{len(gaps)} problems: mean gap {np.mean(gaps):.4f}, largest {max(gaps):.4f}")
    assert np.mean(gaps) <= 0.01
    assert max(gaps) <= 0.1


def test_check_names_what_is_wrong() -> None:
    services, cluster = by_name([make_service("a"), make_service("b", "big")]), Cluster.of(4)

    for placement, match in (
        (Placement((Group(4, ("a",)), Group(1, ("b",)))), "at most 4 GPUs"),
        (Placement((Group(3, ("a",)),)), "'degree' must be one of"),
        (Placement((Group(1, ("c",)),)), "known services"),
        (Placement((Group(1, ("a", "b")),)), "must hold the weights of a, b"),
        (Placement((Group(1, ("a",)),)), r"none for \['b'\]"),
    ):
        with pytest.raises(InfeasibleError, match=match):
            check(placement, services, cluster, fits)


def test_no_group_reaches_over_two_nodes() -> None:
    placement = Placement((Group(1), Group(4), Group(2), Group(1)))

    gpus = gpus_of(placement, Cluster(2, 4))

    assert all(len({node for node, _ in group}) == 1 for group in gpus)
    assert len({gpu for group in gpus for gpu in group}) == 8


def test_interval_follows_equation_eight() -> None:
    assert next_interval_s(100.0, 0.7, 0.9) == pytest.approx(90.0)
    assert next_interval_s(100.0, 0.88, 0.9) == pytest.approx(110.0)
    assert next_interval_s(100.0, 0.5, 1.0, beta=0.5) == 100.0
    assert next_interval_s(100.0, 0.0, 0.0) == 100.0


@pytest.mark.parametrize(
    "arguments",
    [(0.0, 1.0, 1.0), (math.nan, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, -1.0),
     (1.0, 1.0, 1.0, 1.0)],
)  # fmt: skip
def test_interval_refuses_what_is_no_measure(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        next_interval_s(*arguments)


def test_a_placement_that_gains_less_than_it_costs_is_not_taken() -> None:
    old = Placement((Group(1, ("a",)), Group(1, ("b",))))
    new = Placement((Group(2, ("a", "b")),))
    cost = Replacement(lambda group: 10.0)

    assert changes(old, new) == (list(old.groups), list(new.groups))
    assert cost.outage(old, new) == 20.0
    assert cost.is_worth((old, Score(0.5, 3.0)), (new, Score(0.1, 2.0)), 100.0, 2)
    assert not cost.is_worth((old, Score(0.15, 3.0)), (new, Score(0.1, 2.0)), 100.0, 2)
    assert not cost.is_worth((old, Score(0.5, 3.0)), (old, Score(0.1, 2.0)), 100.0, 2)
