"""State monitor (SOLA, Hong et al., MLSys 2025, section 4.3): request and system states.

An engine reports four events - a request arrives, a step is scheduled, a step completes, a
request ends - and reads back a `StepState`. Everything is updated by those events alone;
nothing is recomputed per step from the requests themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sola_sched.compiled.functions import IntArray
from sola_sched.config.slo import DEFAULT_CLASS, SloTarget
from sola_sched.core.fates import Fates
from sola_sched.core.live import LiveRequest
from sola_sched.core.outcomes import ClassOutcomes, MonitorStats
from sola_sched.core.services import Services
from sola_sched.core.state import EngineLimits, LengthModel, StepState
from sola_sched.core.steps import StepsInFlight, warm_up
from sola_sched.core.table import (
    DECODE,
    PARKED,
    PREFILL,
    WAITING,
    RequestTable,
    RequestValues,
)
from sola_sched.core.traffic import RecentTraffic
from sola_sched.cost.model import CostModel
from sola_sched.errors import SloError
from sola_sched.prediction.length import LEVELS, LengthPrediction
from sola_sched.prediction.trust import PredictionTrust

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)

#: Beyond this, either way, priorities are equal: ranks that are computed from them stay in 64 bits.
_MOST_PRIORITY = 2**52


class StateMonitor:
    """Keeps the states that a planner needs, from events of the engine.

    Args:
        cost: Step-time model; corrected online from the measured steps.
        lengths: Output-length distribution; learns from requests that end by themselves.
        clock: Monotonic time in seconds.
        shares: Of the services, as in `Services`.
    """

    def __init__(
        self,
        cost: CostModel,
        lengths: LengthModel,
        clock: Callable[[], float],
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.cost = cost
        self.lengths = lengths
        self.clock = clock
        self.table = RequestTable()
        self.services = Services(shares)
        self.traffic = RecentTraffic()
        self.stats = MonitorStats()
        self.fates = Fates()
        self.trust = PredictionTrust()
        self._steps = StepsInFlight(cost)
        self._is_idle = True
        self._next_pos = 1
        self._front_pos = -1
        self._num_limited = self._num_due = self._num_ranked = 0
        self._parked: set[int] = set()
        self._outcomes: dict[int, ClassOutcomes] = {}  # by row, where not those of the default
        self._limits: EngineLimits | None = None
        self._seldom: dict[str, Any] = {}  # fields of the state that seldom change
        warm_up()

    # Events ---------------------------------------------------------------------------------

    def add(
        self,
        req_id: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        slo: SloTarget,
        arrival_s: float,
        priority: int = 0,
        slo_class: str = DEFAULT_CLASS,
        num_cached_tokens: int = 0,
    ) -> int:
        """A request arrived; returns its row.

        Args:
            arrival_s: On the monitor's clock.
            num_cached_tokens: Tokens of its prompt that need not be computed if it starts now.
            slo_class: Name of its service, under which its end is counted; one of a few.
            The rest: as in `RequestTable`.
        """
        self.traffic.came(arrival_s, num_prompt_tokens - num_cached_tokens)
        service = self.services.index_of(slo_class)
        row = self.table.add(
            req_id,
            arrival_s=arrival_s,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            e2e_s=slo.e2e_s,
            max_wait_s=slo.max_wait_s,
            weight=slo.weight,
            priority=max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)),
            num_prompt=num_prompt_tokens,
            num_cached=num_cached_tokens,
            max_tokens=max_tokens,
            service=service,
            length_class=self.lengths.class_of(num_prompt_tokens, max_tokens, service),
            queue_pos=self._next_pos,
        )
        self.services.num_live[service] += 1
        self._next_pos += 1
        self._num_limited += not slo.is_unlimited
        self._num_due += math.isfinite(slo.e2e_s)
        self._num_ranked += priority != 0
        if slo_class != DEFAULT_CLASS:
            self._outcomes[row] = self.stats.of_class(slo_class)
        self.fates.arrived(self.table, row, self.clock())
        return row

    def rebuild(self, requests: Iterable[LiveRequest], num_steps: int) -> None:
        """Start over with these requests: what was known of them and of the steps is not trusted.

        Targets, arrivals, first tokens and length predictions are taken from the old table where
        they make sense: a request keeps the targets that it came with. What was learned, the
        figures and the clock go on.

        Args:
            requests: All that are unfinished, in the engine's order.
            num_steps: Steps in flight; each still completes, as one whose shape is not known.
        """
        old, now = self.table, self.clock()
        traffic, self.traffic = self.traffic, RecentTraffic()  # these have come before
        table = self.table = RequestTable()
        table.num_added, table.epoch = old.num_added, old.epoch + 1
        self._num_limited = self._num_due = self._num_ranked = 0
        self.services.num_live[:] = 0
        self._parked = set()
        self._outcomes.clear()
        in_flight: list[list[int]] = [[] for _ in range(num_steps)]
        for request in requests:
            arrival_s, first_token_s, predicted = request.arrival_s, math.nan, None
            slo, slo_class = request.slo, request.slo_class
            was = old.row_of.get(request.req_id)
            if (
                was is not None
                and old.num_output[was] <= request.num_output
                and old.arrival_s[was] <= now  # not an earlier input of a session
            ):
                arrival_s, first_token_s = float(old.arrival_s[was]), float(old.first_token_s[was])
                predicted = old.predicted[was]
                values = old.values(was)
                slo, slo_class = _targets_of(values) or slo, self.services.names[values.service]
            row = self.add(
                request.req_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                slo=slo,
                slo_class=slo_class,
                arrival_s=arrival_s,
                priority=request.priority,
            )
            if predicted is not None and predicted[0] > 0.0:  # NaN: none; nobody asks again
                table.predicted[row] = predicted
                table.num_predicted += 1
            table.num_computed[row] = request.num_computed
            table.prefill_target[row] = request.num_tokens
            table.num_output[row] = request.num_output
            table.num_preemptions[row] = request.num_preemptions
            if request.num_output:  # at the latest when it was due, if nobody knows
                if not arrival_s <= first_token_s <= now:
                    first_token_s = min(now, float(table.due_s[row]))
                table.first_token_s[row], table.last_token_s[row] = first_token_s, now
            if request.holds_slot:
                has_begun = request.num_output + request.num_in_flight > 0
                is_decode = has_begun and request.num_computed + 1 >= request.num_tokens
                table.move(row, DECODE if is_decode else PREFILL)
                self.fates.started(table, row, now)
            for rows in in_flight[: request.num_in_flight]:
                rows.append(row)
        self.traffic = traffic
        self.stats.num_unseen += len(old.row_of.keys() - table.row_of.keys())
        self._steps.clear(now)
        for rows in in_flight:
            self._steps.begin_unknown(table, rows, now)

    def predicted(self, req_id: str, prediction: LengthPrediction) -> bool:
        """A length prediction arrived, for a request in any state, perhaps a better one again.

        Returns:
            Whether the request is still there; an answer after its end is counted and dropped.
        """
        row = self.table.row_of.get(req_id)
        if row is None:
            self.stats.num_late_predictions += 1
            return False
        self.table.predict(row, prediction)
        self.stats.num_predicted += 1
        return True

    def admitted(self, row: int, *, num_computed: int, prefill_target: int) -> None:
        """A waiting request got a slot; `num_computed` tokens came from a cache."""
        table = self.table
        self.fates.started(table, row, self.clock())
        table.move(row, PREFILL)
        table.num_computed[row] = num_computed
        table.prefill_target[row] = prefill_target

    def set_back(self, row: int, *, num_computed: int, prefill_target: int) -> None:
        """A request with a slot lost a part of its KV, and is a prefill again."""
        table = self.table
        table.move(row, PREFILL)
        table.num_computed[row] = num_computed
        table.prefill_target[row] = prefill_target
        table.epoch += 1

    def parked(self, rows: Collection[int]) -> None:
        """Exactly these waiting requests are out of the planner's hands for now."""
        if not rows and not self._parked:
            return
        for row in self._parked.difference(rows):
            if self.table.phase[row] == PARKED:
                self.table.move(row, WAITING)
                self.fates.preempted(row, self.clock())
        for row in rows:
            if self.table.phase[row] == WAITING:
                self.table.move(row, PARKED)
                self.fates.parked(row, self.clock())
        self._parked = set(rows)

    def expect_cached(self, row: int, num_tokens: int) -> None:
        """A waiting request would find this many of its tokens computed if it started now."""
        table = self.table
        if table.phase[row] == WAITING and table.num_computed[row] != num_tokens:
            table.num_computed[row] = num_tokens
            table.epoch += 1

    def requeued(self, row: int, *, num_tokens: int, at_front: bool) -> None:
        """A request lost its KV (preemption) or waits for more input; it is WAITING again."""
        table = self.table
        self.fates.preempted(row, self.clock())
        table.move(row, WAITING)
        table.num_computed[row] = 0
        table.prefill_target[row] = num_tokens
        if at_front:
            table.num_preemptions[row] += 1
            table.queue_pos[row] = self._front_pos
            self._front_pos -= 1

    def scheduled(
        self, decode_rows: IntArray, prefill_rows: Sequence[int], prefill_tokens: Sequence[int]
    ) -> None:
        """A step was handed to the accelerator. Steps complete in this order.

        Args:
            decode_rows: Rows that decode in the step; not to be changed afterwards.
            prefill_rows: Rows that prefill, with their `prefill_tokens` in the step.
        """
        if self._is_idle:
            self.begin_step()
        table = self.table
        parts = self.services.parts_of(table, self.cost, decode_rows, prefill_rows, prefill_tokens)
        prefills, tokens = _NO_ROWS, _NO_ROWS
        if len(prefill_rows):
            prefills = np.asarray(prefill_rows, dtype=np.int64)
            tokens = np.asarray(prefill_tokens, dtype=np.int64)
            self.fates.computed(prefill_rows)
        self._steps.begin(table, decode_rows, prefills, tokens, self.clock(), parts)

    @property
    def num_expected(self) -> int:
        """Requests that sample in the oldest step in flight and have not ended since.

        -1 where that is not known.
        """
        return self._steps.num_expected

    def completed(self, rows: IntArray | None = None, num_tokens: IntArray | None = None) -> None:
        """The oldest step in flight completed and delivered tokens.

        Args:
            rows: Rows that received output tokens, each once; None means that each of the
                `num_expected` requests received one.
            num_tokens: Tokens per row, with `rows`.
        """
        elapsed_s, parts = self._steps.end(self.table, self.clock(), rows, num_tokens)
        self.stats.num_steps += 1
        if parts is not None:
            self.services.book(elapsed_s, *parts)

    def finished(
        self,
        req_id: str,
        *,
        by_itself: bool = True,
        rejected: bool = False,
        failed: bool = False,
    ) -> None:
        """A request ended.

        Args:
            by_itself: With a complete answer. If not, its client ended it, unless
                rejected: it was refused because of overload, or
                failed: an error of the engine ended it.
        """
        table = self.table
        row = table.row_of[req_id]
        request = table.values(row)
        has_e2e = math.isfinite(request.e2e_s)
        self._num_due -= has_e2e
        self._num_limited -= (
            has_e2e or math.isfinite(request.ttft_s) or math.isfinite(request.tpot_s)
        )
        self._num_ranked -= request.priority != 0
        outcomes = self._outcomes.pop(row, None) or self.stats.by_class[DEFAULT_CLASS]
        now = self.clock()
        end = self.stats.count_end(
            request, outcomes, now, by_itself=by_itself, rejected=rejected, failed=failed
        )
        service = self.services.names[request.service]
        self.fates.ended(req_id, row, request, service, end, now)
        if by_itself and not rejected and not failed:
            self._compare_prediction(request)
            self.traffic.ended(request.num_output)
            self.lengths.observe(request.length_class, request.num_output)
            self.services.observe(request.service, request.num_prompt, request.num_output)
        self.services.num_live[request.service] -= 1
        self._steps.forget_row(row)
        table.remove(req_id)

    def _compare_prediction(self, request: RequestValues) -> None:
        """Hold the prediction of a request that ended by itself against the histogram's."""
        num_output, quantiles = request.num_output, request.predicted
        if not num_output or not quantiles[0] > 0.0:  # NaN: none
            return
        (usual,) = self.lengths.remaining_quantile(
            0.5,
            np.array([request.length_class], dtype=np.int32),
            np.zeros(1, dtype=np.int64),
            np.array([request.max_tokens]),
        )
        has_changed = self.trust.compare(
            float(np.interp(0.5, LEVELS, quantiles)),
            float(usual),
            num_output,
            max(num_output, request.max_tokens),
        )
        if has_changed:
            self.table.epoch += 1  # what a planner knows has changed for all

    def set_busy(self, is_busy: bool) -> None:
        """Tell whether there is anything to compute now; if not, idle time lasts until a step.

        Idle time is in no step's time, and neither learned nor shared out: time without requests,
        with such only as wait for their client, paused or asleep.
        """
        self._is_idle = not is_busy

    def begin_step(self) -> None:
        """A step is about to be planned, which ends idle time; without this, `scheduled` does."""
        if self._is_idle:
            self._is_idle = False
            if not self._steps.are_computing:  # else its time goes on from the end of that step
                self._steps.set_last_update(self.clock())

    def waited(self, seconds: float) -> None:
        """The engine had something to compute, and waited for the accelerator, another's until now.

        As idle time it is in no step's time.
        """
        if not self._steps.are_computing:
            self._steps.set_last_update(self._steps.averages.last_update_s + seconds)

    # State ----------------------------------------------------------------------------------

    def unplanned(self) -> None:
        """A step is scheduled without a plan that takes its engine time into account."""
        self._steps.pass_over()

    def chunks_in_flight(self) -> IntArray:
        """Prompt tokens of each row that steps in flight compute; the table counts them as done."""
        return self._steps.chunks(self.table.capacity)

    def state(
        self, running: Sequence[int] | IntArray, limits: EngineLimits, num_free_blocks: int
    ) -> StepState:
        """The state for the next plan; call once per step, before it is scheduled.

        Args:
            running: Rows that hold a slot, in the engine's order; not to be changed afterwards.
            limits: Of the engine.
            num_free_blocks: Of its KV cache.
        """
        if limits != self._limits:
            self._limits = limits
            self._seldom = {
                "lengths": self.lengths,
                "cost": self.cost,
                "services": self.services,
                **limits._asdict(),
            }
        _, elapsed_s, prefill_share, accepted_per_decode, free_s = self._steps.take()
        return StepState(
            now_s=max(self.clock(), free_s),
            table=self.table,
            running=np.asarray(running, dtype=np.int64),
            waiting=self.table.waiting,
            num_free_blocks=num_free_blocks,
            accepted_per_decode=accepted_per_decode,
            elapsed_s=elapsed_s,
            prefill_share=prefill_share,
            has_slo=self._num_limited > 0,
            has_e2e=self._num_due > 0,
            has_classes=self._num_ranked > 0,
            traffic=self.traffic,
            lifts=self.services.lifts(),
            trusts_predictions=self.trust.is_trusted,
            **self._seldom,
        )


def _targets_of(request: RequestValues) -> SloTarget | None:
    """The targets of a request in a table; None if these cannot be any."""
    try:
        return SloTarget(
            request.ttft_s, request.tpot_s, request.e2e_s, request.weight,
            request.served_by_s - request.arrival_s,
        )  # fmt: skip
    except SloError:
        return None
