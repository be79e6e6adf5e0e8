"""Services: how a step's time is divided, what is owed, and that what is owed is paid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import DECODE_S, SLO, STEP_S, TOKEN_S, FixedLengths, make_cost

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.services import MOST_OWED_S, NUM_REMEMBERED, Services
from sola_sched.core.state import EngineLimits


def test_services_are_numbered_as_they_come_after_those_with_a_share() -> None:
    services = Services({"chat": 0.3, "batch": 0.1})

    assert [services.index_of(name) for name in ("batch", "other", "default", "chat")] == [
        2, 3, 0, 1
    ]  # fmt: skip
    assert services.share.tolist() == [0.0, 0.3, 0.1, 0.0]


def test_the_last_lengths_of_a_service_are_remembered() -> None:
    services = Services()
    service = services.index_of("chat")

    assert services.lengths_of(service).tolist() == []
    for number in range(NUM_REMEMBERED + 1):
        services.observe(service, 10, number)

    assert services.num_ended(service) == NUM_REMEMBERED + 1
    assert sorted(services.lengths_of(service)[:, 1]) == list(range(1, NUM_REMEMBERED + 1))


class Engine:
    """A monitor whose clock is set by the test; each request decodes once it has been added."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.now = 0.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now, shares)

    def add(self, name: str, service: str, *, decodes: bool = True, prompt: int = 100) -> int:
        row = self.monitor.add(
            name, num_prompt_tokens=prompt, max_tokens=50, slo=SLO, arrival_s=self.now,
            slo_class=service,
        )  # fmt: skip
        if decodes:
            self.monitor.admitted(row, num_computed=prompt - 1, prefill_target=prompt)
            self.step([], [row], [1], 0.0)
        return row

    def step(self, decodes: list[int], prefills: list[int], tokens: list[int], s: float) -> None:
        self.monitor.scheduled(np.array(decodes, int), np.array(prefills, int), np.array(tokens))
        self.now += s
        self.monitor.completed()
        self.monitor.set_busy(True)


@pytest.mark.parametrize("most", [10**13, 2**62, 2**63 - 1, 10**30])
def test_priorities_of_any_size_keep_their_order_beside_shares(most: int) -> None:
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 1.0, {"chat": 0.3, "batch": 0.1})
    rows = [
        monitor.add(
            str(priority), num_prompt_tokens=10, max_tokens=50, slo=SLO, arrival_s=0.0,
            slo_class="chat", priority=priority,
        )
        for priority in (-most, -(10**12), -1, 0, 1, 1_764_000_000_000, 1_764_000_060_000, most)
    ]  # fmt: skip
    monitor.services.lifts = lambda: np.array([0, 1, 2])  # type: ignore[method-assign]
    state = monitor.state([], EngineLimits(100, 9, num_blocks=9, block_size=16), 9)

    assert np.all(np.diff(state.rank_of(np.array(rows))) > 0)


def test_a_step_is_divided_by_what_each_part_takes() -> None:
    engine = Engine({"chat": 0.3, "batch": 0.1})
    rows = [engine.add(f"c{i}", "chat") for i in range(3)] + [engine.add("b", "batch")]
    new = engine.add("n", "batch", decodes=False)
    engine.monitor.admitted(new, num_computed=0, prefill_target=100)

    services = engine.monitor.services
    before = services.served_s.copy()
    engine.step(rows, [new], [100], 1.0)
    had = services.served_s - before

    each_s, chunk_s = STEP_S / 4 + DECODE_S, 100 * TOKEN_S
    assert had[1] == pytest.approx(3 * each_s / (4 * each_s + chunk_s), rel=1e-3)
    assert had[2] == pytest.approx((each_s + chunk_s) / (4 * each_s + chunk_s), rel=1e-3)
    assert had.sum() == pytest.approx(1.0)


def test_one_that_waits_is_owed_its_share_and_no_longer_when_all_it_has_is_served() -> None:
    engine = Engine({"chat": 0.3})
    other = engine.add("o", "default")
    waiting = engine.add("c", "chat", decodes=False)
    services = engine.monitor.services

    engine.step([other], [], [], 1.0)

    assert services.owed_s[1] == pytest.approx(0.3)
    assert services.lifts().tolist() == [0, 1]
    engine.monitor.admitted(waiting, num_computed=0, prefill_target=100)
    engine.step([other], [waiting], [50], 0.01)
    assert services.owed_s[1] > 0.0  # half of its prompt is left
    engine.step([other], [waiting], [50], 0.01)
    assert services.owed_s[1] == 0.0
    assert services.lifts() is None


def test_a_service_that_asks_for_nothing_is_owed_nothing() -> None:
    engine = Engine({"chat": 0.3, "batch": 0.3})
    row = engine.add("o", "chat")
    for _ in range(5):
        engine.step([row], [], [], 1.0)

    assert engine.monitor.services.lifts() is None
    assert engine.monitor.services.served_s[1] == pytest.approx(5.0)


def test_whoever_had_more_than_its_share_while_others_asked_waits_until_that_is_even() -> None:
    services = Services({"chat": 0.25})
    ask = np.array([True, True])
    services.book(1.0, np.array([0.0, 1.0]), ask)
    assert services.owed_s[1] == pytest.approx(-0.75)
    for _ in range(2):
        services.book(1.0, np.array([1.0, 0.0]), ask)
    assert services.lifts() is None
    services.book(1.5, np.array([1.0, 0.0]), ask)
    assert services.lifts().tolist() == [0, 1]


def test_what_was_lent_is_not_owed_back() -> None:
    services = Services({"chat": 0.25})

    services.book(1.0, np.array([0.0, 1.0]), np.array([False, True]))

    assert services.owed_s.tolist() == [0.0, 0.0]


def test_without_shares_nobody_is_owed_anything() -> None:
    engine = Engine({})
    row = engine.add("o", "chat")
    engine.add("w", "batch", decodes=False)
    engine.step([row], [], [], 1.0)

    assert engine.monitor.services.served_s.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert engine.monitor.services.lifts() is None


def test_counts_of_live_requests_survive_a_rebuild() -> None:
    engine = Engine({"chat": 0.3})
    engine.add("o", "chat")
    engine.monitor.rebuild([], 0)

    assert engine.monitor.services.num_live.tolist() == [0, 0]


@st.composite
def _workloads(draw):
    count = draw(st.integers(2, 4))
    weights = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    total = sum(weights) * draw(st.floats(1.05, 3.0))
    shares = {f"s{i}": weight / total for i, weight in enumerate(weights)}
    steps = draw(
        st.lists(
            st.tuples(
                st.floats(0.001, 0.2),
                st.lists(st.booleans(), min_size=count + 1, max_size=count + 1),
            ),
            min_size=100,
            max_size=300,
        )
    )
    return shares, steps


@settings(max_examples=100, deadline=None)
@given(_workloads())
def test_whoever_asks_without_pause_gets_its_share(workload) -> None:
    """The most that any service falls behind its share is bounded, whatever the others ask for.

    Service "s0" asks for time in every step, the others when they like. Each step goes to one of
    those that ask: to the one with the greatest lift, or, at no lift, to the last of them, which
    floods the engine.
    """
    shares, steps = workload
    services = Services(shares)
    count, longest_s = len(services), max(seconds for seconds, _ in steps)
    had_s, passed_s = 0.0, 0.0
    for seconds, asks in steps:
        wants = np.array(asks)
        wants[1] = True
        lifts = services.lifts()
        order = np.zeros(count) if lifts is None else lifts
        served = max(np.flatnonzero(wants), key=lambda i: (order[i], i))
        parts = np.zeros(count)
        parts[served] = 1.0
        services.book(seconds, parts, wants)
        had_s += seconds * (served == 1)
        passed_s += seconds
        assert (abs(services.owed_s) <= MOST_OWED_S).all()
        # Each other service that is owed more goes first, once for each step's worth.
        assert shares["s0"] * passed_s - had_s <= count * longest_s
