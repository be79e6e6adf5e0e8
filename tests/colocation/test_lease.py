"""The lease, between plain processes and within one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from turn_takers import PATIENCE_S, give, take, takers

from sola_sched.colocation.folder import Folder
from sola_sched.colocation.lease import Lease, folder_of
from sola_sched.colocation.table import NUM_SLOTS, WAITING, Table
from sola_sched.errors import ConfigError

#: Of the engines' own promise.
LOST_TO_A_DEATH_S = 0.2


@pytest.fixture
def group(tmp_path: Path) -> str:
    return str(tmp_path / "group")


@pytest.fixture
def join(group: str) -> Iterator[Callable[..., Lease]]:
    leases: list[Lease] = []

    def one(name: str = "me", **options: Any) -> Lease:
        lease = Lease(group, **{"name": name, "share": 0.0, "limit_s": PATIENCE_S, **options})
        leases.append(lease)
        return lease

    yield one
    for lease in leases:
        lease.close()


def wait_until_waiting(group: str, count: int = 1) -> None:
    """Until so many want the turn."""
    table = Table(Folder(Path(group)), PATIENCE_S)
    end_s = time.monotonic() + PATIENCE_S
    while sum(m.state == WAITING for m in table.members().values()) < count:
        assert time.monotonic() < end_s
        time.sleep(1e-3)
    table.close()


def test_one_alone_takes_and_keeps_the_turn(join: Callable[..., Lease]) -> None:
    lease = join()

    take(lease)

    assert lease.has_turn
    assert give(lease, 0.0)
    assert lease.has_turn
    assert not give(lease, None)
    assert not lease.has_turn


def test_the_turn_is_had_by_one_at_a_time(join: Callable[..., Lease], group: str) -> None:
    me = join()
    take(me)
    with takers(group, "other") as (other,):
        other.order("take")
        wait_until_waiting(group)
        assert other.is_waiting

        given_s = time.monotonic()
        give(me, None)

        assert other.answer() >= given_s
        assert not me.has_turn


def test_the_most_urgent_is_next(join: Callable[..., Lease], group: str) -> None:
    me = join()
    take(me)
    with takers(group, "late", "soon", "later") as (late, soon, later):
        for number, (member, urgency) in enumerate([(late, 7.0), (soon, 3.0), (later, 9.0)]):
            member.order("take", urgency)
            wait_until_waiting(group, number + 1)

        give(me, None)
        order = []
        for member in (soon, late, later):
            order.append(member.answer())
            member.order("give", None)
            member.answer()

        assert order == sorted(order)


def test_the_holder_keeps_the_turn_while_it_is_the_most_urgent(
    join: Callable[..., Lease], group: str
) -> None:
    me = join()
    take(me)
    with takers(group, "other") as (other,):
        other.order("take", 5.0)
        wait_until_waiting(group)

        assert give(me, 4.0)
        assert other.is_waiting
        assert not give(me, 6.0)

        other.answer()


def test_who_wants_another_turn_may_be_given_it_before_it_asks(
    join: Callable[..., Lease], group: str
) -> None:
    me = join()
    take(me)
    with takers(group, "other") as (other,):
        other.order("take", 5.0)
        wait_until_waiting(group)
        give(me, 6.0)
        other.answer()

        other.order("give", 7.0)

        assert other.answer() is False
        assert me.has_turn
        take(me, 6.0)  # at once


def test_a_withdrawn_claim_is_not_served(join: Callable[..., Lease], group: str) -> None:
    me = join()
    take(me)
    with takers(group, "other") as (other,):
        other.order("take", 5.0)
        wait_until_waiting(group)
        give(me, 6.0)
        other.answer()

        me.withdraw()
        other.order("give", None)
        other.answer()

        assert not me.has_turn
        other.order("take")
        other.answer()


def test_a_guaranteed_share_goes_before_urgency(join: Callable[..., Lease], group: str) -> None:
    now_s = [time.monotonic()]
    me = join(share=0.0, clock=lambda: now_s[0])
    take(me)
    with takers(group, "other", share=0.5) as (other,):
        other.order("take", 1e9)
        wait_until_waiting(group)

        now_s[0] += 0.19  # half of it is less than the grace
        assert give(me, 0.0)
        now_s[0] += 0.02
        assert not give(me, 0.0)

        other.answer()


def test_a_holder_that_is_killed_loses_the_turn_at_once(
    join: Callable[..., Lease], group: str
) -> None:
    lost_s = []
    me = join()
    for _ in range(5):  # the best of them: on a busy machine one may have to wait for a core
        with takers(group, "other") as (other,):
            other.order("take")
            other.answer()
            started_s = time.monotonic()
            other.kill()
            take(me)
            lost_s.append(time.monotonic() - started_s)
            give(me, None)

    assert min(lost_s) < LOST_TO_A_DEATH_S
    assert me.stats.num_taken_over == 5


def test_a_waiter_that_is_killed_is_not_given_the_turn(
    join: Callable[..., Lease], group: str
) -> None:
    me = join()
    take(me)
    with takers(group, "dead", "alive") as (dead, alive):
        dead.order("take", 1.0)
        wait_until_waiting(group)
        alive.order("take", 2.0)
        wait_until_waiting(group, 2)
        dead.kill()
        dead.process.join(PATIENCE_S)

        give(me, None)

        alive.answer()


def test_one_killed_between_being_given_the_turn_and_taking_it_holds_nobody_up(
    join: Callable[..., Lease], group: str
) -> None:
    me = join()
    with takers(group, "dead", "alive") as (dead, alive):
        take(me)
        dead.order("take", 1.0)
        wait_until_waiting(group)
        alive.order("take", 2.0)
        wait_until_waiting(group, 2)
        os.kill(dead.process.pid or 0, 19)  # SIGSTOP: it is given the turn and does not wake up
        give(me, None)
        assert alive.is_waiting

        dead.kill()

        alive.answer()


def test_a_turn_beyond_the_limit_is_taken_over_and_its_late_end_harms_nobody(
    join: Callable[..., Lease], group: str
) -> None:
    me = join(limit_s=0.05)
    with takers(group, "stopped") as (other,):
        other.order("take")
        other.answer()
        other.order("stop")

        take(me)

        assert me.stats.num_taken_over == 1
        other.resume()
        other.order("give", None)
        assert other.answer() is False
        assert me.has_turn


def test_the_death_of_a_member_frees_its_slot_and_share(
    join: Callable[..., Lease], group: str
) -> None:
    with takers(group, "first", share=0.7) as (first,):
        with pytest.raises(ConfigError, match=r"at most 1 \(got 0\.5 beside 'first'.*0\.7"):
            join("second", share=0.5)

        first.kill()
        first.process.join(PATIENCE_S)

        assert not join("second", share=0.5).has_turn


def test_a_left_group_can_be_joined_again(join: Callable[..., Lease]) -> None:
    for _ in range(2 * NUM_SLOTS):
        lease = join(share=0.6)
        take(lease)
        lease.close()


def test_a_full_group_refuses(join: Callable[..., Lease]) -> None:
    for number in range(NUM_SLOTS):
        join(str(number))

    with pytest.raises(ConfigError, match="at most 16 members"):
        join("one more")


def test_urgencies_of_two_kinds_are_not_compared(join: Callable[..., Lease]) -> None:
    join("first", rule="deadline")

    with pytest.raises(ConfigError, match=r"same kind of urgency.*'shortest'.*'deadline' of"):
        join("second", rule="shortest")


def test_a_group_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(
        ConfigError, match=r"'turns\.group' must be a name, or a folder of this user"
    ):
        Lease(str(tmp_path / "file"), name="me", share=0.0, limit_s=1.0)


def test_a_name_is_a_folder_of_this_user() -> None:
    assert folder_of("gpu0").name == f"sola_sched-turns-{os.getuid()}-gpu0"
    assert folder_of("/some/where") == Path("/some/where")
