"""Step tables for `policy="attain"`: what the lost get, on what is left over and on their share.

Same cost model as in `test_attain`.
"""

from __future__ import annotations

import pytest
from states import StateBuilder, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.planner.attain.tuning import AttainTuning

LOOSE = SloTarget(10.0, 0.1)
#: Credit of the lost that waits no longer for a step in which nobody else would be late.
SAVED_S = AttainTuning().most_saved_s


def test_a_decode_that_missed_ttft_is_held_while_prefills_need_its_time() -> None:
    b = StateBuilder(max_num_tokens=256)
    b.decode("lost", first_ago_s=0.05, out=1, arrived_ago_s=5.0)
    b.decode("fine", first_ago_s=0.05, out=1)
    for i in range(4):
        b.waiting(f"w{i}", waited_s=0.2, prompt=1000)
    plan = make_attain().plan(b.build())
    assert "lost" not in b.names(plan.run)
    assert "fine" in b.names(plan.run)


def test_a_decode_whose_tpot_cannot_be_met_any_more_is_held() -> None:
    b = StateBuilder(left=5.0, max_num_tokens=256)
    b.decode("hopeless", first_ago_s=3.0, out=10)  # 2 s behind with 5 tokens to go
    b.decode("can catch up", first_ago_s=1.05, out=10)  # 50 ms behind, gains 89 ms a step
    b.waiting("w", waited_s=0.2, prompt=5000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.run) == ["can catch up"]


def test_the_lost_run_on_what_is_left_over() -> None:
    b = StateBuilder()
    b.decode("lost", first_ago_s=0.05, out=1, arrived_ago_s=5.0)
    b.decode("fine", first_ago_s=0.05, out=1)
    b.waiting("lost too", waited_s=3.0, prompt=100)
    plan = make_attain().plan(b.build())
    assert plan.run is None  # all of them
    assert b.names(plan.admit) == ["lost too"]


def test_lost_prompts_start_together_where_others_leave_room() -> None:
    b = StateBuilder(max_num_running=64)
    for i in range(100):
        b.waiting(f"lost {i:02}", waited_s=100.0 - i, prompt=4)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit) == [f"lost {i:02}" for i in range(64)]
    assert plan.token_budget == 64 * 4


def test_lost_prefills_that_hold_a_slot_end_before_others_start() -> None:
    b = StateBuilder(max_num_running=8)
    b.waiting("oldest", waited_s=100.0, prompt=4)
    b.waiting("second", waited_s=99.0, prompt=4)
    b.prefill("begun", waited_s=50.0, prompt=20, computed=16)
    plan = make_attain().plan(b.build())
    assert plan.run is not None
    assert b.names(plan.run) == ["begun"]
    assert b.names(plan.admit) == ["oldest", "second"]
    assert plan.token_budget == 12


def test_lost_decodes_that_came_later_go_on_beside_the_oldest_prompt() -> None:
    b = StateBuilder(max_num_running=4)
    for i in range(3):
        b.decode(f"later {i}", first_ago_s=0.1, out=2, arrived_ago_s=50.0 - i)
    b.waiting("oldest", waited_s=100.0, prompt=4)
    plan = make_attain().plan(b.build())
    assert plan.run is None or set(b.names(plan.run)) == {"later 0", "later 1", "later 2"}
    assert b.names(plan.admit) == ["oldest"]
    assert not len(plan.preempt)


@pytest.mark.parametrize("computed", [0, 2999])  # restored KV takes blocks too
def test_lost_decodes_go_on_while_the_oldest_prompt_finds_no_memory(computed: int) -> None:
    b = StateBuilder(num_blocks=100, num_free_blocks=20)
    b.decode("fine", first_ago_s=0.1, out=2)
    b.decode("later", first_ago_s=0.1, out=2, arrived_ago_s=50.0)
    b.table.num_computed[b.waiting("oldest", waited_s=100.0, prompt=3000)] = computed
    planner = make_attain(best_effort_share=0.1)
    plan = planner.plan(b.build())
    assert plan.run is None or set(b.names(plan.run)) == {"fine", "later"}
    assert not len(plan.admit)
    assert planner.account.credit_s == 0.0  # what others get in the meantime is no debt


def test_best_effort_credit_serves_the_oldest_lost_request_first() -> None:
    planner = make_attain(best_effort_share=0.1)
    served = []
    for _ in range(30):
        b = StateBuilder(max_num_tokens=512, elapsed_s=0.05)
        b.decode("fine", first_ago_s=0.0, out=1)
        b.waiting("younger lost", waited_s=3.0, prompt=300)
        b.waiting("oldest lost", waited_s=9.0, prompt=300)
        for i in range(10):
            b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
        plan = planner.plan(b.build())
        served += [name for name in b.names(plan.admit) if "lost" in name]
    # 30 steps x 50 ms x 10 % = 150 ms of credit, 30 ms for each service
    assert served.count("oldest lost") in (4, 5)
    assert set(served) == {"oldest lost"}


@pytest.mark.parametrize(("prompt", "num_served"), [(20, 5), (200, 1)])
def test_short_lost_prompts_share_the_step_that_credit_pays_for(
    prompt: int, num_served: int
) -> None:
    """As many as take the time that such a step costs anyway, 11 ms; 2 or 20 ms each."""
    planner = make_attain(best_effort_share=0.1)
    planner.account.credit_s = 0.1
    b = StateBuilder(max_num_tokens=512)
    b.decode("fine", first_ago_s=0.0, out=1)
    for i in range(10):
        b.waiting(f"lost {i}", waited_s=9.0 - i, prompt=prompt)
    for i in range(10):
        b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
    plan = planner.plan(b.build())
    assert b.names(plan.admit) == [f"lost {i}" for i in range(num_served)]
    assert plan.token_budget == num_served * prompt + 1
    assert planner.account.credit_s == pytest.approx(0.1 - num_served * prompt * 1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("share", "credit_s", "waited_s", "first"),
    [
        (0.05, 0.1, 0.35, "on time"),
        (0.05, SAVED_S, 0.35, "lost"),
        (0.05, 0.1, 0.0, "lost"),
        (0.1, 0.1, 0.35, "lost"),
    ],
    ids=["others cannot wait", "enough is saved", "others can wait", "a large share"],
)
def test_credit_waits_while_its_step_would_make_others_late(
    share: float, credit_s: float, waited_s: float, first: str
) -> None:
    """Three prompts that take most of what is left to their deadlines, or have 0.35 s more."""
    planner = make_attain(best_effort_share=share)
    planner.account.credit_s = credit_s
    b = StateBuilder()
    for i in range(10):
        b.decode(f"d{i}", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.1))
    b.waiting("lost", waited_s=9.0, prompt=300)
    for i in range(3):
        b.waiting(f"on time {i}", waited_s=waited_s, prompt=1200, slo=SloTarget(0.9, 0.1))
    plan = planner.plan(b.build())
    assert b.names(plan.admit)[0].startswith(first)


def test_a_lost_request_whose_kv_comes_back_is_charged_for_what_it_holds() -> None:
    """It computes one token. At that price the lost would take the memory of those on time."""
    planner = make_attain(best_effort_share=0.1)
    planner.account.credit_s = 0.1
    b = StateBuilder(max_num_tokens=512)
    b.decode("fine", first_ago_s=0.0, out=1)
    row = b.waiting("restored", waited_s=9.0, prompt=200)
    b.table.num_computed[row], b.table.num_preemptions[row] = 199, 1
    for i in range(10):
        b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
    plan = planner.plan(b.build())
    assert b.names(plan.admit) == ["restored"]
    assert plan.token_budget == 2
    assert planner.account.credit_s == pytest.approx(0.1 - 200 * 1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("swaps", "share", "displaced"),
    [
        (False, 0.05, ["lost 2"]),
        (True, 0.05, ["lost 2"]),
        (True, 0.0, ["lost 2"]),
        (True, 0.96, []),
    ],
)
def test_lost_decodes_that_run_give_way_to_those_on_time(
    swaps: bool, share: float, displaced: list[str]
) -> None:
    """With swapping up to a share of the memory; without as far as they have no credit."""
    b = StateBuilder(num_blocks=60, num_free_blocks=3)
    for i in range(3):
        b.decode(f"lost {i}", first_ago_s=0.1, out=2, arrived_ago_s=50.0 - i, prompt=300)
    b.waiting("w", waited_s=0.1, prompt=160)
    state = b.build()
    if swaps:
        state.reload_s_per_token = 1e-6
    plan = make_attain(best_effort_share=share).plan(state)
    assert b.names(plan.admit) == ["w"]
    assert b.names(plan.preempt) == displaced
    runs = {"lost 0", "lost 1", "lost 2"} - set(displaced)
    assert plan.run is None if not displaced else set(b.names(plan.run)) == runs


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    ("credit_s", "displaced", "paid_s"), [(0.05, [], 0.005), (0.0, ["lost 3"], 0.0)]
)
def test_credit_pays_for_the_slot_of_a_lost_decode_that_one_on_time_wants(
    credit_s: float, displaced: list[str], paid_s: float, swaps: bool
) -> None:
    """One of four slots for the 20 ms that have passed; 4 ms of the step are from leftovers."""
    b = StateBuilder(max_num_running=4, elapsed_s=0.02)
    for i in range(4):
        b.decode(f"lost {i}", first_ago_s=0.1, out=2, arrived_ago_s=50.0 - i)
    b.waiting("w", waited_s=0.1, prompt=160)
    state = b.build()
    if swaps:
        state.reload_s_per_token = 1e-6
    planner = make_attain(best_effort_share=0.0)
    planner.account.credit_s = credit_s
    plan = planner.plan(state)
    assert b.names(plan.preempt) == displaced
    assert planner.account.credit_s == pytest.approx(credit_s - 0.004 - paid_s, abs=1e-4)


def test_where_nobody_on_time_wants_their_slots_lost_decodes_pay_nothing() -> None:
    b = StateBuilder(max_num_running=4, elapsed_s=0.02)
    for i in range(4):
        b.decode(f"lost {i}", first_ago_s=0.1, out=2, arrived_ago_s=50.0 - i)
    b.waiting("too late", waited_s=9.0, prompt=160)
    planner = make_attain(best_effort_share=0.0)
    planner.account.credit_s = 0.1
    plan = planner.plan(b.build())
    assert not len(plan.preempt)
    assert planner.account.credit_s == 0.1


@pytest.mark.parametrize("num_full_steps", [0, 2])
def test_the_lost_earn_their_share_also_in_steps_where_all_slots_are_taken(
    num_full_steps: int,
) -> None:
    """What the lost request gets costs 10 ms, a step earns 5 ms."""
    planner = make_attain(best_effort_share=0.1)
    for num_slots in [2] * num_full_steps + [3]:
        b = StateBuilder(max_num_running=num_slots, elapsed_s=0.05)
        for i in range(2):
            b.decode(f"fine {i}", first_ago_s=0.1, out=2)
        b.waiting("lost", waited_s=9.0)
        for i in range(5):
            b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
        plan = planner.plan(b.build())
    assert ("lost" in b.names(plan.admit)) == (num_full_steps > 0)


def test_service_from_slack_counts_towards_the_share() -> None:
    planner = make_attain(best_effort_share=0.1)

    def served(num_others: int) -> bool:
        b = StateBuilder(max_num_tokens=512, elapsed_s=0.05)
        # A tenth of what its TPOT leaves is enough for the lost one.
        b.decode("fine", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.3))
        b.waiting("lost", waited_s=9.0, prompt=200)
        for i in range(num_others):
            b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
        return "lost" in b.names(planner.plan(b.build()).admit)

    # 5 ms are earned a step and 20 ms needed; the first service was free.
    assert served(num_others=0)
    assert [served(num_others=10) for _ in range(20)].index(True) in (6, 7)


def test_a_lost_request_that_finds_no_slot_beside_the_others_is_not_charged_for_service() -> None:
    planner = make_attain(best_effort_share=0.1)
    b = StateBuilder(max_num_running=2, elapsed_s=0.05)
    b.decode("fine", first_ago_s=0.1, out=2)
    b.waiting("lost", waited_s=9.0)
    b.waiting("on time", waited_s=0.2)
    plan = planner.plan(b.build())
    assert b.names(plan.admit)[0] == "on time"
    assert planner.account.credit_s == pytest.approx(0.005)


def test_while_the_oldest_lost_finds_no_slot_slack_goes_to_one_that_has_it_and_is_no_debt() -> None:
    planner = make_attain(best_effort_share=0.1)
    b = StateBuilder(max_num_running=3)
    b.decode("lost decode", first_ago_s=5.0, out=40, arrived_ago_s=20.0)
    b.decode("fine", first_ago_s=0.1, out=2)
    started = b.prefill("started", waited_s=8.0, computed=900)
    b.waiting("oldest", waited_s=9.0)
    plan = planner.plan(b.build())
    assert plan.run is not None
    assert set(b.names(plan.run)) == {"lost decode", "fine", "started"}
    assert not len(plan.admit)
    assert not len(plan.preempt)
    assert planner.account.credit_s >= 0.0
    b.table.remove("started")
    b.running.remove(started)
    assert b.names(planner.plan(b.build()).admit) == ["oldest"]


def test_without_a_share_the_lost_wait_for_slack() -> None:
    planner = make_attain(best_effort_share=0.0)
    for _ in range(30):
        b = StateBuilder(max_num_tokens=512, elapsed_s=0.05)
        b.waiting("lost", waited_s=9.0, prompt=300)
        for i in range(10):
            b.waiting(f"w{i}", waited_s=0.3, prompt=2000)
        assert "lost" not in b.names(planner.plan(b.build()).admit)


def test_a_held_lost_decode_gives_its_slot_to_a_request_that_can_make_it() -> None:
    b = StateBuilder(max_num_running=2, max_num_tokens=512)
    b.decode("fine", first_ago_s=0.0, out=1)
    old = b.decode("old lost", first_ago_s=0.05, out=1, arrived_ago_s=9.0)
    young = b.decode("young lost", first_ago_s=0.05, out=1, arrived_ago_s=5.0)
    for i in range(3):
        b.waiting(f"w{i}", waited_s=0.4, prompt=1000)
    plan = make_attain().plan(b.build())
    assert young in plan.preempt
    assert b.names(plan.admit)[0] == "w0"
    assert old not in plan.run


def test_no_more_held_decodes_leave_than_the_memory_they_give_back_is_needed() -> None:
    b = StateBuilder(max_num_tokens=512, num_blocks=1000, num_free_blocks=20)
    b.decode("fine", first_ago_s=0.0, out=1)
    b.decode("old lost", first_ago_s=0.05, out=2000, arrived_ago_s=9.0)
    young = b.decode("young lost", first_ago_s=0.05, out=2000, arrived_ago_s=5.0)
    for i in range(3):
        b.waiting(f"w{i}", waited_s=0.4, prompt=1000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit)[0] == "w0"
    assert plan.preempt.tolist() == [young]


def test_a_lost_prefill_that_sits_out_gives_its_slot_to_a_request_that_can_make_it() -> None:
    b = StateBuilder(max_num_running=2, max_num_tokens=512)
    b.decode("fine", first_ago_s=0.0, out=1)
    begun = b.prefill("begun", waited_s=9.0, prompt=2000, computed=1000)
    for i in range(3):
        b.waiting(f"w{i}", waited_s=0.4, prompt=400)
    plan = make_attain().plan(b.build())
    assert plan.preempt.tolist() == [begun]
    assert b.names(plan.admit)[0] == "w0"
    assert begun not in plan.run


def test_the_share_of_the_lost_is_not_taken_from_a_higher_class() -> None:
    b = StateBuilder(max_num_tokens=512)
    b.decode("fine", first_ago_s=0.0, out=1)
    b.waiting("lost", waited_s=5.0, prompt=1000, priority=1)
    b.waiting("upper", waited_s=0.0, prompt=1000)
    planner = make_attain(best_effort_share=0.5)
    planner.account.credit_s, planner.account.is_blocked = 0.5, True
    plan = planner.plan(b.build(elapsed_s=0.1))
    assert b.names(plan.admit)[:1] == ["upper"]
