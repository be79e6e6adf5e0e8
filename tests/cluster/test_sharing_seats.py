"""GPUs for groups, and changes of placements in which nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.seats import Move, Seat, moves, seat, served_through
from sola_sched.errors import InfeasibleError

NODE = Cluster.of(8)
groups = st.builds(
    Group, st.sampled_from([1, 2, 4]), st.sets(st.sampled_from("abc"), min_size=1).map(
        lambda names: tuple(sorted(names))
    ),
)  # fmt: skip
#: At most 8 GPUs.
placements = st.lists(groups, max_size=4).map(
    lambda some: Placement(
        tuple(g for i, g in enumerate(some) if sum(x.degree for x in some[: i + 1]) <= 8)
    )
)


def on(group: Group, *gpus: int) -> Seat:
    return Seat(group, tuple((0, gpu) for gpu in gpus))


A, B, C = (Group(1, (name,)) for name in "abc")
AB = Group(1, ("a", "b"))


@given(placements, placements, st.sets(st.sampled_from("abc")))
def test_moves_lead_to_the_new_seats_and_never_need_a_gpu_twice(
    before: Placement, after: Placement, changed: set[str]
) -> None:
    old = seat(before, NODE)
    new = seat(after, NODE, old, changed)

    steps = moves(old, new, changed)

    served_through(steps, old)
    running = list(old)
    for step in steps:
        (running.append if step.action == "start" else running.remove)(step.seat)
    assert sorted(running, key=repr) == sorted(new, key=repr)
    assert sorted(map(repr, (one.group for one in new))) == sorted(map(repr, after.groups))
    for one in new:
        assert len({node for node, _ in one.gpus}) == 1
        assert len(set(one.gpus)) == one.group.degree
    restarted = {step.seat for step in steps if step.action == "start"}
    assert all(one in restarted for one in new if set(one.group.services) & changed)


def test_groups_that_stay_keep_their_gpus_and_are_not_moved() -> None:
    old = seat(Placement((A, B, C)), NODE)

    new = seat(Placement((C, AB)), NODE, old)

    assert old[2] in new
    assert old[2] not in [step.seat for step in moves(old, new)]


def test_with_free_gpus_no_service_is_without_a_group() -> None:
    old = [on(A, 0), on(B, 1)]
    new = seat(Placement((AB, A)), Cluster.of(4), old)

    assert served_through(moves(old, new), old) == {"a": 1, "b": 1}


def test_on_full_gpus_who_has_another_group_stops_first() -> None:
    old = [on(A, 0), on(A, 1), on(B, 2), on(C, 3)]
    new = [on(A, 0), on(Group(1, ("b", "c")), 1), on(B, 2), on(C, 3)]

    assert moves(old, new) == [Move("stop", on(A, 1)), Move("start", on(Group(1, ("b", "c")), 1))]


def test_changed_service_starts_anew_on_its_gpu_and_no_other_does() -> None:
    old = [on(A, 0), on(B, 1)]

    steps = moves(old, seat(Placement((A, B)), NODE, old, ["b"]), ["b"])

    assert {step.seat.group for step in steps} == {B}
    assert [step.action for step in steps][-1] in ("start", "stop")


def test_a_large_group_among_scattered_small_ones_seats_all_anew() -> None:
    old = [on(A, 0), on(B, 2), on(C, 4), on(AB, 6)]
    four = Group(4, ("d",))

    new = seat(Placement((A, B, C, four)), NODE, old)

    assert [one.gpus for one in new if one.group == four] != []
    served_through(moves(old, new), old)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="must lie on one node"):
        seat(Placement((Group(8, ("a",)), A)), NODE)
