"""Sessions that lose their KV while the token that ends their turn is in flight, and all the rest.

vLLM by itself drops the history of such a session, and takes it out of all queues.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from chaos import ChaosScheduler
from faults import Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_sessions import (
    PARKED,
    TURNS_ARE_APART,
    assert_each_has_one_place,
    later_limit,
    open_session,
    send_next,
)
from needs import NEEDS_SWAPPING
from table_checks import check_table_at_each_step
from virtual_runs import make_small_engine, step_until, warm_up
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

POLICIES = ("attain", "paper", "alise", "doubling")
NUM_FIRST, NUM_NEXT = 8, 5


def num_sent(ends_early: bool) -> int:
    """Tokens of both turns of `answered`."""
    return NUM_FIRST + later_limit(2 * NUM_FIRST if ends_early else NUM_FIRST, NUM_NEXT)


def preempt(scheduler: Any, name: str) -> bool:
    """Preempt a request that runs, as vLLM does when memory is short."""
    request = scheduler.requests[name]
    if request not in scheduler.running or not scheduler._seams.can_preempt(request):
        return False
    scheduler.running.remove(request)
    scheduler._seams.preempt(request, 0.0)
    return True


def answered(
    scheduler_cls: type[Any], *, displaced: bool, following: str, ends_early: bool, policy: str
) -> tuple[Any, int]:
    """A session of two turns; its first may be preempted as it ends.

    Args:
        following: When the second input comes: "early", while the first is answered; "late".
        ends_early: The turn ends with a token that nobody could foresee, so a further one is in
            flight.

    Returns:
        The session, and how many tokens it was sent.
    """
    engine = make_small_engine(scheduler_cls, async_scheduling=True, scheduling_policy=policy)
    scheduler = engine.scheduler
    limit = 2 * NUM_FIRST if ends_early else None
    open_session(engine, VirtualRequest("session", 0.0, NUM_FIRST, prompt_len=30, max_tokens=limit))
    engine.add(VirtualRequest("other", 0.0, 100, prompt_len=20))
    session = engine._requests["session"]
    step_until(engine, lambda: session.num_output_tokens == NUM_FIRST - 2)
    if following == "early":
        send_next(engine, output_len=NUM_NEXT)
    step_until(engine, lambda: session.num_output_tokens == NUM_FIRST - 1)
    assert session.num_in_flight_tokens
    if displaced:
        assert preempt(scheduler, "session")
    if following == "late":
        step_until(engine, lambda: session.status.name == PARKED)
        assert_each_has_one_place(scheduler)
        send_next(engine, output_len=NUM_NEXT)
    assert_each_has_one_place(scheduler)
    wanted = num_sent(ends_early)

    def is_answered() -> bool:
        assert_each_has_one_place(scheduler)
        return engine.record("session").num_output_tokens >= wanted

    step_until(engine, is_answered, 500)
    step_until(engine, lambda: session.status.name == PARKED, 10)
    return session, engine.record("session").num_output_tokens


@pytest.mark.parametrize("ends_early", [False, True], ids=["by-its-limit", "by-a-stop-token"])
@pytest.mark.parametrize("following", ["early", "late"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_session_that_is_displaced_as_its_turn_ends_is_answered_as_if_it_were_not(
    policy: str, following: str, ends_early: bool
) -> None:
    options = {"following": following, "ends_early": ends_early, "policy": policy}
    undisturbed, num_undisturbed = answered(AsyncScheduler, displaced=False, **options)
    session, num_tokens = answered(sola_sched.Scheduler, displaced=True, **options)

    assert num_tokens == num_undisturbed == num_sent(ends_early)
    if ends_early and not TURNS_ARE_APART:
        pytest.skip("up to 0.30 vLLM keeps the token that ends a turn if one more is in flight")
    assert list(session.all_token_ids) == list(undisturbed.all_token_ids)
    assert session.num_prompt_tokens == undisturbed.num_prompt_tokens
    assert session.status.name == undisturbed.status.name == PARKED


@pytest.mark.parametrize("end", ["last", "abort"])
@pytest.mark.parametrize("is_parked", [False, True], ids=["in-flight", "parked"])
def test_a_displaced_session_that_ends_leaves_nothing(is_parked: bool, end: str) -> None:
    engine = make_small_engine(sola_sched.Scheduler, async_scheduling=True)
    scheduler, num_free = engine.scheduler, engine.num_free_blocks
    open_session(engine, VirtualRequest("session", 0.0, NUM_FIRST, prompt_len=30))
    engine.add(VirtualRequest("other", 0.0, 40, prompt_len=20))
    session = engine._requests["session"]
    step_until(engine, lambda: session.num_output_tokens == NUM_FIRST - 1)
    assert preempt(scheduler, "session")
    if is_parked:
        step_until(engine, lambda: session.status.name == PARKED)
    if end == "last":
        send_next(engine, is_last=True)
    else:
        scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    step_until(engine, lambda: False)

    assert not scheduler.requests
    assert not scheduler._sessions.without_kv
    assert engine.num_free_blocks == num_free
    assert_each_has_one_place(scheduler)


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_wants_the_slot_of_a_session_whose_turn_ends_gets_it_and_nobody_is_lost(
    policy: str, scheduling_policy: str
) -> None:
    num_tokens = 40 + later_limit(40, 10)
    for num_ahead in range(4):  # of its tokens, when the urgent one comes
        engine = make_small_engine(
            sola_sched.Scheduler,
            {"ttft_s": 2.0, "tpot_s": 0.05, "policy": policy},
            max_num_seqs=2,
            async_scheduling=True,
            scheduling_policy=scheduling_policy,
        )
        scheduler = engine.scheduler
        warm_up(engine)
        open_session(engine, VirtualRequest("session", 5.0, 40, prompt_len=30, priority=5))
        engine.add(VirtualRequest("other", 5.0, 150, prompt_len=30))
        step_until(engine, lambda e=engine: e.record("session").num_output_tokens >= 20)
        send_next(engine, prompt_len=12, output_len=10, priority=5)
        for number in range(4):
            engine.add(
                VirtualRequest(
                    f"low{number}", engine.clock.now, 5, prompt_len=30, priority=5 + number % 2
                )
            )
        step_until(
            engine, lambda e=engine, n=40 - num_ahead: e.record("session").num_output_tokens >= n
        )
        engine.add(VirtualRequest("urgent", engine.clock.now, 5, prompt_len=30))
        names = ("urgent", "other", *(f"low{number}" for number in range(4)))

        def are_answered(engine: VirtualEngine = engine, names: Any = names) -> bool:
            assert_each_has_one_place(engine.scheduler)
            return engine.record("session").num_output_tokens == num_tokens and all(
                engine.record(name).is_finished for name in names
            )

        step_until(engine, are_answered, 3000)
        assert are_answered()
        assert scheduler.requests["session"].num_tokens == 30 - 1 + 12 + num_tokens


@pytest.mark.injects_failures
@pytest.mark.parametrize("following", ["early", "late"])
@pytest.mark.parametrize("site", ["queue add", "queue contains", "queue prepend", "queue remove"])
def test_a_failure_while_a_session_is_kept_loses_no_request(site: str, following: str) -> None:
    for share, seed in ((0.5, 0), (0.5, 1), (1.0, 2)):
        with Faults(site, share=share, seed=seed).injected() as faults:
            session, num_tokens = answered(
                sola_sched.Scheduler,
                displaced=True,
                following=following,
                ends_early=False,
                policy="fcfs",
            )
        assert faults.total or share < 1.0
        assert session.status.name == PARKED
        assert num_tokens == num_sent(ends_early=False)


class DisplacingScheduler(ChaosScheduler):
    """`ChaosScheduler` that also preempts at random who runs, in particular who is about to end."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        rng = self._rng = getattr(self, "_rng", None) or random.Random(
            self.vllm_config.additional_config["chaos"]
        )
        for request in list(self.running):
            if rng.random() < (0.5 if self._seams.is_ending(request) else 0.05):
                preempt(self, request.request_id)
        output = super().schedule(*args, **kwargs)
        assert_each_has_one_place(self)
        self.sola_monitor.table.check_integrity()
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        assert_each_has_one_place(self)
        return outputs


def assert_all_answered(
    engine: VirtualEngine, session: Any, sent: list[tuple[int, int, int]]
) -> None:
    """Each turn has its tokens; the last one of each but the last is not in the history."""
    first, *later = (turn[2] for turn in sent)
    num_tokens = first + sum(later_limit(first, own) for own in later)
    assert engine.record(session.request_id).num_output_tokens == num_tokens
    assert session.num_tokens == sum(turn[1] for turn in sent) + num_tokens - (len(sent) - 1)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Sessions, of each its turns: steps before the input comes, its tokens, and the answer's."""
    turn = st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 9))
    return draw(st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=5))


@pytest.mark.parametrize(
    "swapped",
    [
        pytest.param(False, id="computed-again"),
        pytest.param(True, id="swapped", marks=NEEDS_SWAPPING),
    ],
)
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@given(
    turns=conversations(),
    num_others=st.integers(0, 6),
    aborts=st.dictionaries(st.integers(0, 4), st.integers(1, 120), max_size=2),
    chosen=st.fixed_dictionaries(
        {
            "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
            "max_num_seqs": st.integers(2, 6),
            "num_blocks": st.sampled_from([12, 16, 40]),
            "max_num_batched_tokens": st.sampled_from([16, 64]),
            "enable_prefix_caching": st.booleans(),
        }
    ),
    scheduler_cls=st.sampled_from([DisplacingScheduler, sola_sched.Scheduler]),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_whatever_happens_to_sessions_each_has_one_place_and_all_of_its_answers(
    turns: list[list[tuple[int, int, int]]],
    num_others: int,
    aborts: dict[int, int],
    chosen: dict[str, Any],
    scheduler_cls: type[Any],
    policy: str,
    seed: int,
    async_scheduling: bool,
    swapped: bool,
) -> None:
    sola = {"policy": policy, "ttft_s": 0.2, "tpot_s": 0.012}
    if swapped:
        from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

        sola["swap"] = {"mode": "raw", "always": True, "host_gib": 0.05}
        chosen = chosen | {"swap_link": LinkSpeed(100_000, 1e8)}
    engine = make_small_engine(
        scheduler_cls,
        max_model_len=176,
        async_scheduling=async_scheduling,
        stall_limit_s=1e9,
        additional_config={"sola_sched": sola, "chaos": seed},
        **chosen,
    )
    scheduler, num_free = engine.scheduler, engine.num_free_blocks
    check_table_at_each_step(scheduler)
    for number in range(num_others):
        engine.add(VirtualRequest(f"other{number}", 0.1 * number, 12, prompt_len=20, priority=1))
    waiting = {f"session{number}": list(inputs) for number, inputs in enumerate(turns)}
    due = {name: inputs[0][0] for name, inputs in waiting.items()}
    aborted = {f"session{number}": step for number, step in aborts.items()}
    sent: dict[str, list[tuple[int, int, int]]] = {name: [] for name in waiting}

    for step in range(3000):
        for name in list(waiting):
            if step >= aborted.get(name, 3000) and name in engine._records:
                engine.abort(name)
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                del waiting[name]
                continue
            if waiting[name] and step >= due[name]:
                _, prompt_len, output_len = turn = waiting[name].pop(0)
                if sent[name]:
                    send_next(engine, name, prompt_len=prompt_len, output_len=output_len)
                else:
                    options = {"prompt_len": prompt_len, "priority": step % 3}
                    open_session(
                        engine, VirtualRequest(name, engine.clock.now, output_len, **options)
                    )
                    engine.admit()
                sent[name].append(turn)
                due[name] = step + (waiting[name][0][0] if waiting[name] else 0)
            session = scheduler.requests.get(name)
            if session and not waiting[name] and session.status.name == PARKED:
                assert_all_answered(engine, session, sent[name])
                send_next(engine, name, is_last=True)  # those that wait for input keep a slot
                del waiting[name]
        engine.step()
        assert_each_has_one_place(scheduler)
        if not waiting and not engine.has_arrivals and not scheduler.requests:
            break

    assert not waiting
    step_until(engine, lambda: False, 200)
    assert not scheduler.requests
    assert engine.num_free_blocks == num_free
    if swapped:
        assert scheduler.sola_copies.is_idle
        assert not scheduler.sola_copies.num_copies
