"""State monitor (SOLA, Hong et al., MLSys 2025, section 4.3): request and system states.

An engine reports four events - a request arrives, a step is scheduled, a step completes, a
request ends - and reads back a `StepState`. Everything is updated by those events alone;
nothing is recomputed per step from the requests themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.config.slo import DEFAULT_CLASS, SloTarget
from sola_sched.core.outcomes import ClassOutcomes, MonitorStats
from sola_sched.core.services import BoolArray, FloatArray, Services
from sola_sched.core.state import (
    DECODE,
    PARKED,
    PREFILL,
    WAITING,
    IntArray,
    LengthModel,
    RequestTable,
    StepState,
)
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.prediction.length import LEVELS, LengthPrediction
from sola_sched.prediction.trust import PredictionTrust

#: Weight of the newest step in the running averages of the system state.
_AVERAGING = 0.05

#: Phases of requests that hold a slot.
_HOLD_SLOT = (PREFILL, DECODE)

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _StepRecord:
    scheduled_s: float
    shape: StepShape
    predicted_s: float
    sampling: IntArray  # rows that sample, but for those that have ended since
    is_known: bool = True  # whether these are all
    begun: Sequence[int] = ()  # those of them that end their prefill in it
    parts: tuple[FloatArray, BoolArray] | None = None  # of the services


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """What an engine itself knows of an unfinished request; see `StateMonitor.rebuild`.

    Attributes:
        req_id, num_prompt_tokens, max_tokens, slo, slo_class, priority: As in `StateMonitor.add`.
        arrival_s: When it arrived, where nothing better is known, on the monitor's clock.
        holds_slot: Whether it runs.
        num_computed: Tokens whose KV exists or is being computed.
        num_tokens: Its prompt and output tokens, those in flight included.
        num_output: Output tokens delivered.
        num_in_flight: Output tokens in flight.
        num_preemptions: Times it lost its KV.
    """

    req_id: str
    num_prompt_tokens: int
    max_tokens: int
    slo: SloTarget
    arrival_s: float
    slo_class: str = DEFAULT_CLASS
    priority: int = 0
    holds_slot: bool = False
    num_computed: int = 0
    num_tokens: int = 0
    num_output: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0


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
        self.stats = MonitorStats()
        self.trust = PredictionTrust()
        self.prefill_share = 0.0
        self.accepted_per_decode = 1.0
        self._in_flight: deque[_StepRecord] = deque()
        self._last_update_s = -math.inf
        self._was_busy = False
        self._elapsed_s = 0.0
        self._next_pos = 1
        self._front_pos = -1
        self._num_limited = self._num_due = self._num_ranked = 0
        self._num_running = 0
        self._slot_s = math.nan  # time of all slots held, since the latest of them that ended
        self._num_freed = 0  # ends of slots that are not averaged yet
        self.end_interval_s = math.nan
        self._parked: set[int] = set()
        self._outcomes: dict[int, ClassOutcomes] = {}  # by row, where not those of the default
        self._to_begin: set[int] = set()  # sample their first token in a step in flight
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
    ) -> int:
        """A request arrived; returns its row.

        Args:
            arrival_s: On the monitor's clock.
            slo_class: Name of its service, under which its end is counted; one of a few.
            The rest: as in `RequestTable`.
        """
        table = self.table
        row = table.add(req_id)
        table.arrival_s[row] = arrival_s
        table.ttft_s[row] = slo.ttft_s
        table.due_s[row] = arrival_s + slo.ttft_s
        table.tpot_s[row] = slo.tpot_s
        table.e2e_s[row] = slo.e2e_s
        table.e2e_due_s[row] = arrival_s + slo.e2e_s
        table.weight[row] = slo.weight
        table.priority[row] = priority
        table.num_prompt[row] = num_prompt_tokens
        table.prefill_target[row] = num_prompt_tokens
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

        Arrivals and first tokens are taken from the old table where they make sense. What was
        learned, the figures and the clock go on.

        Args:
            requests: All that are unfinished, in the engine's order.
            num_steps: Steps in flight; each still completes, as one whose shape is not known.
        """
        old, now = self.table, self.clock()
        table = self.table = RequestTable()
        table.num_added, table.epoch = old.num_added, old.epoch + 1
        self._num_limited = self._num_due = self._num_ranked = 0
        self.services.num_live[:] = 0
        self._to_begin.clear()
        self._waiting_epoch = -1
        self._parked = set()
        self._outcomes.clear()
        self._last_update_s, self._elapsed_s = now, 0.0
        in_flight: list[list[int]] = [[] for _ in range(num_steps)]
        for request in requests:
            arrival_s, first_token_s = request.arrival_s, math.nan
            was = old.row_of.get(request.req_id)
            if was is not None and old.arrival_s[was] <= now:
                arrival_s, first_token_s = float(old.arrival_s[was]), float(old.first_token_s[was])
            row = self.add(
                request.req_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                slo=request.slo,
                slo_class=request.slo_class,
                arrival_s=arrival_s,
                priority=request.priority,
            )
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
            if request.num_in_flight and not request.num_output:
                self._to_begin.add(row)
        self.stats.num_unseen += len(old.row_of.keys() - table.row_of.keys())
        self._in_flight = deque(
            _StepRecord(now, StepShape(0, 0, 0, 0.0, 0.0), 0.0, np.array(rows, np.int64), False)
            for rows in in_flight
        )

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
        self, decode_rows: IntArray, prefill_rows: IntArray, prefill_tokens: IntArray
    ) -> None:
        """A step was handed to the accelerator. Steps complete in this order.

        Args:
            decode_rows: Rows that decode in the step.
            prefill_rows: Rows that prefill, with their `prefill_tokens` in the step.
        """
        table = self.table
        ctx = table.num_tokens(decode_rows)
        parts = self.services.parts_of(table, self.cost, decode_rows, prefill_rows, prefill_tokens)
        new, squares, products, sampled = 0, 0, 0, []
        # A loop: nearly always these are few.
        for row, tokens in zip(prefill_rows.tolist(), prefill_tokens.tolist(), strict=True):
            has = int(table.num_computed[row])
            new += tokens
            squares += tokens * tokens
            products += has * tokens
            table.num_computed[row] = has + tokens
            if has + tokens >= table.prefill_target[row]:
                table.move(row, DECODE)
                sampled.append(row)
                if math.isnan(table.first_token_s[row]):
                    self._to_begin.add(row)
        shape = StepShape(len(decode_rows), ctx, new, float(squares), float(products))
        sampling = np.concatenate([decode_rows, sampled]) if sampled else decode_rows
        predicted_s = self.cost.step_s(shape) if self.cost.is_ready else 0.0
        record = _StepRecord(self.clock(), shape, predicted_s, sampling, begun=sampled, parts=parts)
        self._in_flight.append(record)

    @property
    def num_expected(self) -> int:
        """Requests that sample in the oldest step in flight and have not ended since.

        -1 where that is not known.
        """
        record = self._in_flight[0]
        return len(record.sampling) if record.is_known else -1

    def completed(self, rows: IntArray | None = None, num_tokens: IntArray | None = None) -> None:
        """The oldest step in flight completed and delivered tokens.

        Args:
            rows: Rows that received output tokens, each once; None means that each of the
                `num_expected` requests received one.
            num_tokens: Tokens per row, with `rows`.
        """
        now = self.clock()
        table, record = self.table, self._in_flight.popleft()
        start = self._last_update_s if self._was_busy else record.scheduled_s
        elapsed = now - start
        self._last_update_s = now
        self._elapsed_s += elapsed
        self._slot_s += elapsed * self._num_running
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
        delivered = record.sampling if rows is None else rows
        if not len(delivered):
            return
        if rows is not None:
            fresh = rows[np.isnan(table.first_token_s[rows])]
            table.first_token_s[fresh] = now
            self._to_begin.difference_update(fresh.tolist())
        elif self._to_begin:
            self._note_first_tokens(record, now)
        table.last_token_s[delivered] = now
        table.deliver(delivered, num_tokens)
        if num_tokens is not None and shape.num_decodes:
            mean = int(num_tokens.sum()) / len(delivered)
            self.accepted_per_decode += _AVERAGING * (max(1.0, mean) - self.accepted_per_decode)

    def _note_first_tokens(self, record: _StepRecord, now_s: float) -> None:
        """Everybody in this step has received a token."""
        for row in list(self._to_begin):
            if row in record.begun or np.count_nonzero(record.sampling == row):
                self.table.first_token_s[row] = now_s
                self._to_begin.discard(row)

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
        has_e2e = math.isfinite(table.e2e_s[row])
        self._num_due -= has_e2e
        self._num_limited -= bool(
            has_e2e or math.isfinite(table.ttft_s[row]) or math.isfinite(table.tpot_s[row])
        )
        self._num_ranked -= bool(table.priority[row] != 0)
        self._count_end(row, by_itself, rejected, failed)
        self.services.num_live[table.service[row]] -= 1
        if table.phase[row] in _HOLD_SLOT:
            self._num_freed += 1
        self._to_begin.discard(row)
        for record in self._in_flight:
            record.sampling = record.sampling[record.sampling != row]
        table.remove(req_id)

    def _count_end(self, row: int, by_itself: bool, rejected: bool, failed: bool) -> None:
        table, stats = self.table, self.stats
        outcomes = self._outcomes.pop(row, None) or stats.by_class[DEFAULT_CLASS]
        num_output = int(table.num_output[row])
        # An answer without tokens, as of a pooling model, comes at the end.
        first = float(table.first_token_s[row]) if num_output else self.clock()
        ttft = first - float(table.arrival_s[row])
        ttft_met = ttft <= table.ttft_s[row]
        if rejected:
            stats.num_rejected += 1
            outcomes.rejected += 1
        elif failed:
            stats.num_failed += 1
            outcomes.missed += 1
        elif not by_itself:
            stats.num_aborted += 1
            if ttft_met and self.clock() <= table.e2e_due_s[row]:
                outcomes.aborted += 1
            else:
                outcomes.missed += 1
        else:
            self._compare_prediction(row, num_output)
            self.lengths.observe(int(table.length_class[row]), num_output)
            self.services.observe(int(table.service[row]), int(table.num_prompt[row]), num_output)
            last = float(table.last_token_s[row]) if num_output else first
            tpot_met = num_output < 2 or (last - first) / (num_output - 1) <= table.tpot_s[row]
            e2e_met = last - float(table.arrival_s[row]) <= table.e2e_s[row]
            attained = bool(ttft_met and tpot_met and e2e_met)
            if math.isfinite(table.e2e_s[row]):
                stats.num_e2e += 1
                stats.num_e2e_met += bool(e2e_met)
            stats.num_finished += 1
            stats.num_ttft_met += bool(ttft_met)
            stats.num_tpot_met += bool(tpot_met)
            stats.num_attained += attained
            stats.max_wait_s = max(stats.max_wait_s, ttft)
            outcomes.attained += attained
            outcomes.missed += not attained

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

    def _average_ends(self, num_slots: int) -> None:
        """Average the time between two ends of slots, as it is while all slots are held.

        From the time for which a slot is held: an idle or half empty engine has fewer ends, but
        not for want of turnover (Little's law).
        """
        num_freed, self._num_freed = self._num_freed, 0
        if not num_freed:
            return
        interval_s = self._slot_s / num_freed / num_slots
        self._slot_s = 0.0
        if math.isnan(interval_s):
            return  # the first: nobody knows since when
        if math.isnan(self.end_interval_s):
            self.end_interval_s = interval_s
        weight = 1.0 - (1.0 - _AVERAGING) ** num_freed
        self.end_interval_s += weight * (interval_s - self.end_interval_s)

    def set_busy(self, is_busy: bool) -> None:
        """Tell after each step whether requests are left: idle time is not step time."""
        self._was_busy = is_busy

    # State ----------------------------------------------------------------------------------

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
    ) -> StepState:
        """The state for the next plan; call once per step, before it is scheduled.

        Args:
            running: Rows that hold a slot, in the engine's order; not to be changed afterwards.
            The rest: as in `StepState`.
        """
        table = self.table
        rows = np.asarray(running, dtype=np.int64)
        if self._waiting_epoch != table.epoch:
            (self._waiting,) = (table.phase == WAITING).nonzero()
            self._waiting_epoch = table.epoch
        self._average_ends(max_num_running)
        self._num_running = len(rows)
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
            num_ahead=self._num_ahead(rows),
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
            accepted_per_decode=self.accepted_per_decode,
            elapsed_s=elapsed,
            prefill_share=self.prefill_share,
            end_interval_s=self.end_interval_s,
            has_slo=self._num_limited > 0,
            has_e2e=self._num_due > 0,
            has_classes=self._num_ranked > 0,
            services=self.services,
            lifts=self.services.lifts(),
            trusts_predictions=self.trust.is_trusted,
        )

    def _num_ahead(self, rows: IntArray) -> IntArray:
        """Output tokens in flight for each of `rows`."""
        if not self._in_flight:
            return np.zeros(len(rows), dtype=np.int64)
        sampling = [record.sampling for record in self._in_flight]
        every = np.concatenate(sampling) if len(sampling) > 1 else sampling[0]
        counts: IntArray = np.bincount(every, minlength=self.table.capacity)
        return counts[rows]
