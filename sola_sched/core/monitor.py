"""State monitor (SOLA, Hong et al., MLSys 2025, section 4.3): request and system states.

An engine reports four events - a request arrives, a step is scheduled, a step completes, a
request ends - and reads back a `StepState`. Everything is updated by those events alone;
nothing is recomputed per step from the requests themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sola_sched.compiled.functions import BoolArray, FloatArray, IntArray
from sola_sched.config.slo import DEFAULT_CLASS, SloTarget
from sola_sched.core.live import LiveRequest
from sola_sched.core.outcomes import ClassOutcomes, MonitorStats
from sola_sched.core.services import Services
from sola_sched.core.state import (
    DECODE,
    PARKED,
    PREFILL,
    WAITING,
    LengthModel,
    RequestTable,
    StepState,
    rows_of,
)
from sola_sched.core.traffic import RecentTraffic
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.prediction.length import LEVELS, LengthPrediction
from sola_sched.prediction.trust import PredictionTrust

#: Weight of the newest step in the running averages of the system state.
_AVERAGING = 0.05

#: Beyond this, either way, priorities are equal: ranks that are computed from them stay in 64 bits.
_MOST_PRIORITY = 2**52

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_NO_STEP = _NO_ROWS, _NO_ROWS
_NO_SHAPE = StepShape(0, 0, 0, 0.0, 0.0)


@dataclass(slots=True)
class _StepRecord:
    scheduled_s: float
    rows: tuple[IntArray, IntArray]  # those that decode, and those whose prefill ends
    prefill: tuple[int, float, float] = (0, 0.0, 0.0)  # as in `StepShape`
    is_known: bool = True  # whether these are all that sample
    parts: tuple[FloatArray, BoolArray] | None = None  # of the services
    gone: list[int] = field(default_factory=list)  # rows that have ended since
    chunks: dict[str, int] = field(default_factory=dict)  # prompt tokens by request
    # From here on what `_settle` notes.
    shape: StepShape = _NO_SHAPE
    predicted_s: float = 0.0

    @property
    def num_sampled(self) -> int:
        return len(self.rows[0]) + len(self.rows[1])

    def samples(self, row: int) -> bool:
        return any(bool((rows == row).any()) for rows in self.rows)


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
        self.trust = PredictionTrust()
        self.prefill_share = 0.0
        self.accepted_per_decode = 1.0
        self._in_flight: deque[_StepRecord] = deque()
        self._unsettled: _StepRecord | None = None
        self._last_update_s = -math.inf
        self._is_idle = True
        self._elapsed_s = 0.0
        self._next_pos = 1
        self._front_pos = -1
        self._num_limited = self._num_due = self._num_ranked = 0
        self._parked: set[int] = set()
        self._outcomes: dict[int, ClassOutcomes] = {}  # by row, where not those of the default
        self._waiting, self._waiting_epoch = _NO_ROWS, -1

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
        table = self.table
        row = table.add(req_id)
        table.arrival_s[row] = arrival_s
        table.ttft_s[row] = slo.ttft_s
        table.due_s[row] = arrival_s + slo.ttft_s
        table.tpot_s[row] = slo.tpot_s
        table.e2e_s[row] = slo.e2e_s
        table.e2e_due_s[row] = arrival_s + slo.e2e_s
        table.weight[row] = slo.weight
        table.priority[row] = max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY))
        table.num_prompt[row] = num_prompt_tokens
        table.prefill_target[row] = num_prompt_tokens
        table.num_computed[row] = num_cached_tokens
        table.max_tokens[row] = max_tokens
        service = table.service[row] = self.services.index_of(slo_class)
        self.services.num_live[service] += 1
        table.length_class[row] = self.lengths.class_of(num_prompt_tokens, max_tokens, service)
        table.queue_pos[row] = self._next_pos
        self._next_pos += 1
        self._num_limited += not slo.is_unlimited
        self._num_due += math.isfinite(slo.e2e_s)
        self._num_ranked += priority != 0
        if slo_class != DEFAULT_CLASS:
            self._outcomes[row] = self.stats.of_class(slo_class)
        return row

    def rebuild(self, requests: Iterable[LiveRequest], num_steps: int) -> None:
        """Start over with these requests: what was known of them and of the steps is not trusted.

        Arrivals, first tokens and length predictions are taken from the old table where they make
        sense. What was learned, the figures and the clock go on.

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
        self._waiting_epoch = -1
        self._parked = set()
        self._outcomes.clear()
        self._last_update_s, self._elapsed_s = now, 0.0
        in_flight: list[list[int]] = [[] for _ in range(num_steps)]
        for request in requests:
            arrival_s, first_token_s, predicted = request.arrival_s, math.nan, None
            was = old.row_of.get(request.req_id)
            is_same = was is not None and old.num_output[was] <= request.num_output
            if is_same and old.arrival_s[was] <= now:  # not an earlier input of a session
                arrival_s, first_token_s = float(old.arrival_s[was]), float(old.first_token_s[was])
                predicted = old.predicted[was]
            row = self.add(
                request.req_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                slo=request.slo,
                slo_class=request.slo_class,
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
            for rows in in_flight[: request.num_in_flight]:
                rows.append(row)
        self.traffic = traffic
        self.stats.num_unseen += len(old.row_of.keys() - table.row_of.keys())
        self._in_flight.clear()
        self._unsettled = None
        for rows in in_flight:
            record = self._unsettled = _StepRecord(now, (_NO_ROWS, rows_of(rows)), is_known=False)
            self._in_flight.append(record)
            self._settle()

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
        for row in rows:
            if self.table.phase[row] == WAITING:
                self.table.move(row, PARKED)
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
        self._settle()
        self.begin_step()
        table = self.table
        parts = self.services.parts_of(table, self.cost, decode_rows, prefill_rows, prefill_tokens)
        new, squares, products, sampled = 0, 0, 0, []
        chunks: dict[str, int] = {}
        for row, tokens in zip(prefill_rows, prefill_tokens, strict=True):
            has = int(table.num_computed[row])
            new += tokens
            squares += tokens * tokens
            products += has * tokens
            table.num_computed[row] = has + tokens
            if (name := table.req_id[row]) is not None:
                chunks[name] = tokens
            if has + tokens >= table.prefill_target[row]:
                table.move(row, DECODE)
                sampled.append(row)
        record = self._unsettled = _StepRecord(
            self.clock(),
            (decode_rows, rows_of(sampled)),
            (new, float(squares), float(products)),
            parts=parts,
            chunks=chunks,
        )
        self._in_flight.append(record)

    def _settle(self) -> None:
        """Note of the step that was scheduled last what depends on the table as it is by then.

        Called before anything changes that: so `scheduled` itself touches no array, which would
        find its code displaced from the processor's caches by the engine's own.
        """
        record, self._unsettled = self._unsettled, None
        if record is not None:
            self._weigh(record, self.table.begin(*record.rows))

    def _weigh(self, record: _StepRecord, ctx: int) -> None:
        """Predict the time of a step whose decodes have so many tokens in sum."""
        record.shape = StepShape(len(record.rows[0]), ctx, *record.prefill)
        if self.cost.is_ready:
            record.predicted_s = self.cost.step_s(record.shape)

    @property
    def num_expected(self) -> int:
        """Requests that sample in the oldest step in flight and have not ended since.

        -1 where that is not known.
        """
        record = self._in_flight[0]
        if not record.is_known:
            return -1
        return record.num_sampled - len(record.gone)

    def completed(self, rows: IntArray | None = None, num_tokens: IntArray | None = None) -> None:
        """The oldest step in flight completed and delivered tokens.

        Args:
            rows: Rows that received output tokens, each once; None means that each of the
                `num_expected` requests received one.
            num_tokens: Tokens per row, with `rows`.
        """
        now = self.clock()
        table, record = self.table, self._in_flight.popleft()
        newest, self._unsettled = self._unsettled, None
        ctx = table.begin_and_end(
            _NO_STEP if newest is None else newest.rows,
            record.rows,
            record.gone,
            now if rows is None else None,
        )
        if newest is not None:
            self._weigh(newest, ctx)
        elapsed = now - self._last_update_s
        self._last_update_s = now
        self._elapsed_s += elapsed
        self.stats.num_steps += 1
        shape = record.shape
        if record.parts is not None:
            self.services.book(elapsed, *record.parts)
        if shape.num_decodes or shape.prefill_tokens:
            self.cost.observe(shape, elapsed)
            share = 0.0
            if shape.prefill_tokens and record.predicted_s > 0:
                decode_s = self.cost.decode_s(shape.num_decodes, shape.decode_ctx_tokens)
                share = max(0.0, 1.0 - float(decode_s) / record.predicted_s)
            self.prefill_share += _AVERAGING * (share - self.prefill_share)
        if rows is None or num_tokens is None or not len(rows):
            return
        table.deliver(rows, now, num_tokens)
        if shape.num_decodes:
            mean = int(num_tokens.sum()) / len(rows)
            self.accepted_per_decode += _AVERAGING * (max(1.0, mean) - self.accepted_per_decode)

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
        self._settle()
        table = self.table
        row = table.row_of[req_id]
        has_e2e = math.isfinite(table.e2e_s[row])
        self._num_due -= has_e2e
        self._num_limited -= bool(
            has_e2e or math.isfinite(table.ttft_s[row]) or math.isfinite(table.tpot_s[row])
        )
        self._num_ranked -= bool(table.priority[row] != 0)
        outcomes = self._outcomes.pop(row, None) or self.stats.by_class[DEFAULT_CLASS]
        self.stats.count_end(
            table, row, outcomes, self.clock(),
            by_itself=by_itself, rejected=rejected, failed=failed,
        )  # fmt: skip
        if by_itself and not rejected and not failed:
            num_output = int(table.num_output[row])
            self._compare_prediction(row, num_output)
            self.traffic.ended(num_output)
            self.lengths.observe(int(table.length_class[row]), num_output)
            self.services.observe(int(table.service[row]), int(table.num_prompt[row]), num_output)
        self.services.num_live[table.service[row]] -= 1
        if num_in_flight := table.num_in_flight[row]:
            for record in self._in_flight:
                is_in = num_in_flight == len(self._in_flight) or record.samples(row)
                if is_in and row not in record.gone:
                    record.gone.append(row)
        table.remove(req_id)

    def _compare_prediction(self, row: int, num_output: int) -> None:
        """Hold the prediction of a request that ended by itself against the histogram's."""
        table = self.table
        if not num_output or not table.predicted[row, 0] > 0.0:  # NaN: none
            return
        rows = np.array([row])
        usual = self.lengths.remaining_quantile(
            0.5, table.length_class[rows], np.zeros(1, dtype=np.int64), table.max_tokens[rows]
        )
        has_changed = self.trust.compare(
            float(np.interp(0.5, LEVELS, table.predicted[row])),
            float(usual[0]),
            num_output,
            max(num_output, int(table.max_tokens[row])),
        )
        if has_changed:
            table.epoch += 1  # what a planner knows has changed for all

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
            if not self._is_computing():  # else its time goes on from the end of that step
                self._last_update_s = self.clock()

    def waited(self, seconds: float) -> None:
        """The engine had something to compute, and waited for the accelerator, another's until now.

        As idle time it is in no step's time.
        """
        if not self._is_computing():
            self._last_update_s += seconds

    def _is_computing(self) -> bool:
        """Whether a step is in flight that is not empty."""
        return any(
            len(record.rows[0]) or record.prefill[0] or not record.is_known
            for record in self._in_flight
        )

    # State ----------------------------------------------------------------------------------

    def chunks_in_flight(self) -> IntArray:
        """Prompt tokens of each row that steps in flight compute; the table counts them as done."""
        tokens = np.zeros(len(self.table.phase), dtype=np.int64)
        for record in self._in_flight:
            for req_id, count in record.chunks.items():
                row = self.table.row_of.get(req_id)
                if row is not None:
                    tokens[row] += count
        return tokens

    def state(
        self,
        running: Sequence[int] | IntArray,
        *,
        max_num_tokens: int,
        max_num_running: int,
        num_free_blocks: int,
        num_blocks: int,
        block_size: int,
        tokens_per_decode: int = 1,
        chunks_prefills: bool = True,
        max_chunk: int | None = None,
    ) -> StepState:
        """The state for the next plan; call once per step, before it is scheduled.

        Args:
            running: Rows that hold a slot, in the engine's order; not to be changed afterwards.
            The rest: as in `StepState`.
        """
        self._settle()
        table = self.table
        rows = np.asarray(running, dtype=np.int64)
        if not table.num_in_phase[WAITING]:
            self._waiting, self._waiting_epoch = _NO_ROWS, table.epoch
        elif self._waiting_epoch != table.epoch:
            (self._waiting,) = (table.phase == WAITING).nonzero()
            self._waiting_epoch = table.epoch
        now = self.clock()
        start = now
        if self._in_flight:
            free_s = max(self._last_update_s, self._in_flight[0].scheduled_s)
            for record in self._in_flight:
                free_s += record.predicted_s
            start = max(now, free_s)
        elapsed, self._elapsed_s = self._elapsed_s, 0.0
        return StepState(
            now_s=start,
            table=table,
            running=rows,
            waiting=self._waiting,
            lengths=self.lengths,
            cost=self.cost,
            max_num_tokens=max_num_tokens,
            max_num_running=max_num_running,
            num_free_blocks=num_free_blocks,
            num_blocks=num_blocks,
            block_size=block_size,
            tokens_per_decode=tokens_per_decode,
            chunks_prefills=chunks_prefills,
            max_chunk=max_chunk,
            accepted_per_decode=self.accepted_per_decode,
            elapsed_s=elapsed,
            prefill_share=self.prefill_share,
            has_slo=self._num_limited > 0,
            has_e2e=self._num_due > 0,
            has_classes=self._num_ranked > 0,
            services=self.services,
            traffic=self.traffic,
            lifts=self.services.lifts(),
            trusts_predictions=self.trust.is_trusted,
        )
