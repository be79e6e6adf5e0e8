"""Plain data between an engine and a planner: `StepState` in, `StepPlan` out.

Per-request state lives in one struct of arrays (`RequestTable`), so that a planner works on
whole columns and a step with hundreds of requests costs microseconds, not a Python loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sola_sched.compiled.functions import BoolArray, FloatArray, IntArray, Records, records_of
from sola_sched.core import loops
from sola_sched.core.services import Services
from sola_sched.core.traffic import RecentTraffic
from sola_sched.cost.model import CostModel
from sola_sched.prediction.length import (
    NUM_LEVELS,
    LengthLines,
    LengthPrediction,
    remaining_at,
    remaining_mean,
)

__all__ = ["BoolArray", "FloatArray", "IntArray"]

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)

#: Share of requests that may end before `StepState.surely_remaining`.
_RARE = 0.05
#: Probabilities of `StepState.likely_remaining`: the middles of equal parts of the mass.
LIKELY = (0.1, 0.3, 0.5, 0.7, 0.9)

#: Values of `RequestTable.phase`.
FREE, WAITING, PREFILL, DECODE, PARKED = 0, 1, 2, 3, 4
_NUM_PHASES = 5

#: A request: types of its fields and what they are at first, in the order in which they are read.
_FIELDS: dict[str, tuple[Any, Any]] = {
    "num_prompt": (np.int64, 0),
    "num_output": (np.int64, 0),
    "num_in_flight": (np.int64, 0),
    "max_tokens": (np.int64, 0),
    "first_token_s": (np.float64, np.nan),
    "last_token_s": (np.float64, np.nan),
    "due_s": (np.float64, np.inf),
    "tpot_s": (np.float64, np.inf),
    "e2e_due_s": (np.float64, np.inf),
    "arrival_s": (np.float64, 0.0),
    "ttft_s": (np.float64, np.inf),
    "num_computed": (np.int64, 0),
    "prefill_target": (np.int64, 0),
    "weight": (np.float64, 1.0),
    "priority": (np.int64, 0),
    "service": (np.int64, 0),
    "length_class": (np.int32, 0),
    "phase": (np.int8, FREE),
    "serial": (np.int64, -1),
    "num_preemptions": (np.int64, 0),
    "e2e_s": (np.float64, np.inf),
    "queue_pos": (np.int64, 0),
    "ewt_s": (np.float64, np.nan),
    "predicted": ((np.float64, NUM_LEVELS), np.full(NUM_LEVELS, np.nan)),
}
#: The record of a request.
REQUEST = np.dtype([(name, kind) for name, (kind, _) in _FIELDS.items()], align=True)


class RequestTable:
    """One record (`REQUEST`) per live request; rows are reused.

    Compiled functions take `records`. Python reads and writes columns, which are views of it, all
    of length `capacity` (`predicted` is [capacity, 10]):
        phase: FREE, WAITING (no KV on the accelerator), PREFILL, DECODE, or PARKED (out of the
            planner's hands, e.g. while a connector loads its KV). Written by `move` alone.
        serial: Number of the request, counted from 0: tells two requests in one row apart.
        arrival_s: Arrival on the monitor's clock, seconds.
        ttft_s, tpot_s, e2e_s: Targets, seconds; ``inf`` means none.
        due_s: When the first token is due: ``arrival_s + ttft_s``.
        e2e_due_s: When the last token is due: ``arrival_s + e2e_s``.
        weight: What the request is worth if it meets its targets, > 0.
        priority: Smaller is more urgent, as in vLLM.
        service: Its service, as `Services` counts them.
        queue_pos: First-come-first-served position; preempted requests get one in front.
        num_prompt, max_tokens: Tokens.
        length_class: Class of the output-length distribution.
        num_computed: Tokens whose KV exists or is being computed; exact while in PREFILL. While
            WAITING those that a prefix cache is expected to hold.
        prefill_target: Tokens to compute before the next token can be sampled.
        num_output: Output tokens delivered; counted by `end` and `deliver`.
        num_in_flight: Steps in flight that sample a token of the request; counted by `begin` and
            `end`.
        first_token_s, last_token_s: Delivery times, seconds; NaN before the first token.
        num_preemptions: Times the request lost its KV.
        predicted: Quantiles of the total output tokens, as in `LengthPrediction`; NaN without one.
            Written by `predict` alone.
        ewt_s: Estimated wait until the request runs (again), seconds; 0 while it runs, NaN while
            nobody has estimated it.

    Attributes:
        records: All of it, [capacity].
        num_predicted: Live rows with a prediction.
        num_added: Rows given so far.
        epoch: Moves with every event that changes who is there, their phases, or what is known
            of them beforehand. While it stands, they only compute and deliver tokens.
        num_in_phase: Live rows by phase.
    """

    records: Records
    phase: NDArray[np.int8]
    serial: IntArray
    arrival_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    due_s: FloatArray
    e2e_s: FloatArray
    e2e_due_s: FloatArray
    weight: FloatArray
    priority: IntArray
    service: IntArray
    queue_pos: IntArray
    num_prompt: IntArray
    max_tokens: IntArray
    length_class: NDArray[np.int32]
    num_computed: IntArray
    prefill_target: IntArray
    num_output: IntArray
    num_in_flight: IntArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    num_preemptions: IntArray
    predicted: FloatArray
    ewt_s: FloatArray

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.row_of: dict[str, int] = {}
        self.req_id: list[str | None] = [None] * capacity
        self.num_predicted = self.num_added = self.epoch = 0
        self.num_in_phase = [0] * _NUM_PHASES
        self._free = list(range(capacity - 1, -1, -1))
        self._new = _new_records(1)[0]
        self._put(_new_records(capacity))
        loops.warm_up(self.records)

    def __len__(self) -> int:
        return len(self.row_of)

    def add(self, req_id: str) -> int:
        """Give `req_id` a row in WAITING, with every other column at its default.

        Raises:
            ValueError: The request is in the table already.
        """
        if req_id in self.row_of:
            raise ValueError(f"request {req_id!r} must be new (it is in the table already).")
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.row_of[req_id] = row
        self.req_id[row] = req_id
        self.records[row] = self._new
        self.serial[row] = self.num_added
        self.num_added += 1
        self.move(row, WAITING)
        return row

    def remove(self, req_id: str) -> None:
        """Free the row of `req_id`; its values stay readable until the row is reused."""
        row = self.row_of.pop(req_id)
        self.req_id[row] = None
        self.num_predicted -= not math.isnan(self.predicted[row, 0])
        self.move(row, FREE)
        self._free.append(row)

    def move(self, row: int, phase: int) -> None:
        """Put a row into another phase."""
        self.num_in_phase[self.phase[row]] -= 1
        self.num_in_phase[phase] += 1
        self.phase[row] = phase
        self.epoch += 1

    def predict(self, row: int, prediction: LengthPrediction) -> None:
        """Note what is predicted of a live row, in place of what was."""
        self.num_predicted += math.isnan(self.predicted[row, 0])
        self.predicted[row] = prediction.quantiles
        self.epoch += 1

    def num_tokens(self, rows: IntArray) -> int:
        """Prompt and delivered output tokens of these rows, in sum."""
        return int(loops.sum_tokens(self.records, rows))

    def shortest_tpot_s(self, rows: IntArray) -> float:
        """The shortest TPOT target of these rows, inf for none."""
        return float(loops.shortest_tpot_s(self.records, rows))

    def begin(self, decodes: IntArray, sampled: IntArray) -> int:
        """A step that samples a token of each of these rows is in flight; `num_tokens` of decodes.

        Args:
            decodes: Rows that decode.
            sampled: Rows whose prefill ends.
        """
        return int(loops.begin(self.records, decodes, sampled))

    def begin_and_end(
        self,
        begun: tuple[IntArray, IntArray],
        ended: tuple[IntArray, IntArray],
        gone: Sequence[int],
        now_s: float | None,
    ) -> int:
        """As `begin`; then the oldest step in flight has brought each of its rows a token.

        Args:
            begun, ended: Rows that decode and rows whose prefill ends, of both; perhaps one step.
            gone: Those of the step that has ended that are not there any more: their rows may be
                another request's by now.
            now_s: When it ended; None if the tokens are told by `deliver`.
        """
        end_s = math.nan if now_s is None else now_s
        return int(loops.begin_and_end(self.records, *begun, *ended, rows_of(gone), end_s))

    def deliver(self, rows: IntArray, now_s: float, num_tokens: IntArray) -> None:
        """These rows, each once, have received so many output tokens now."""
        loops.deliver(self.records, rows, num_tokens, now_s)

    def check_integrity(self) -> None:
        """Assert that rows, names and free list agree (for tests and debug runs)."""
        assert len(self.row_of) + len(self._free) == self.capacity, (
            f"{len(self.row_of)} live + {len(self._free)} free rows != {self.capacity}"
        )
        for req_id, row in self.row_of.items():
            assert self.req_id[row] == req_id, f"row {row}: {self.req_id[row]!r} != {req_id!r}"
            assert self.phase[row] != FREE, f"live request {req_id!r} has a free row"
        live = np.fromiter(self.row_of.values(), np.int64, len(self.row_of))
        num_predicted = int((~np.isnan(self.predicted[live, 0])).sum())
        assert num_predicted == self.num_predicted, f"{num_predicted} != {self.num_predicted}"
        num_in_phase = np.bincount(self.phase[live], minlength=_NUM_PHASES).tolist()
        counted = [0, *self.num_in_phase[1:]]
        assert num_in_phase == counted, f"{num_in_phase} != {counted}"

    def _grow(self) -> None:
        old = self.capacity
        self.capacity = 2 * old
        self._free = list(range(self.capacity - 1, old - 1, -1))
        self.req_id.extend([None] * old)
        records = _new_records(self.capacity)
        records[:old] = self.records
        self._put(records)

    def _put(self, records: Records) -> None:
        self.records = records
        for name in _FIELDS:
            setattr(self, name, np.asarray(records[name]))


def rows_of(rows: Sequence[int]) -> IntArray:
    """An array of them."""
    return np.array(rows, dtype=np.int64) if rows else _NO_ROWS


def _new_records(count: int) -> Records:
    records = records_of(REQUEST, count)
    for name, (_, default) in _FIELDS.items():
        records[name] = default
    return records


class LengthModel(Protocol):
    """Output-length distribution D_i (SOLA 4.3); `length_predictor.LengthHistogram` is one."""

    def class_of(self, num_prompt_tokens: int, max_tokens: int, service: int = 0) -> int:
        """Class of a request by its input length, output limit and service."""

    def observe(self, class_id: int, num_output_tokens: int) -> None:
        """Learn from one finished request."""

    def remaining(
        self, class_ids: NDArray[np.int32], num_output: IntArray, max_tokens: IntArray
    ) -> FloatArray:
        """Expected output tokens left (>= 1), given how many were generated."""

    def remaining_quantile(
        self, q: float, class_ids: NDArray[np.int32], num_output: IntArray, max_tokens: IntArray
    ) -> FloatArray:
        """Output tokens left (>= 1) that a share `q` of such requests does not exceed."""

    def lines(self) -> LengthLines:
        """What `remaining` goes by now; `NO_LINES` where it is not of this form."""


def are_equal(rows: IntArray, others: IntArray) -> bool:
    """Whether both are the same rows in the same order; cheaper than `np.array_equal`."""
    if rows is others:
        return True
    return len(rows) == len(others) == np.count_nonzero(rows == others)


def blocks_of_step(num_tokens: IntArray, num_new: int, block_size: int) -> IntArray:
    """KV blocks that each of these decodes takes in the next step, [n].

    The newest token of a decode has no KV yet: the step computes it.

    Args:
        num_tokens: Prompt and output tokens of each, those in flight counted, >= 1, [n].
        num_new: Tokens that the step computes for each: 1, and as many as there are drafts.
        block_size: Tokens.
    """
    held = num_tokens - 1
    blocks: IntArray = -(-(held + num_new) // block_size) - -(-held // block_size)
    return blocks


@dataclass(slots=True)
class StepState:
    """What a planner may know when it plans one step.

    Attributes:
        now_s: Time at which the planned step is expected to start, seconds on the clock of the
            table. With steps still in flight this lies ahead of the wall.
        table: Per-request columns.
        running: Rows of requests that hold a slot and KV, in the engine's order.
        waiting: Rows of requests without KV, any order.
        lengths: Output-length distribution; see `remaining`.
        cost: Step-time model.
        max_num_tokens: Largest token budget of a step.
        max_num_running: Slots.
        num_free_blocks, num_blocks, block_size: KV cache; sizes in blocks and tokens.
        tokens_per_decode: Tokens a decode occupies in the budget (1 + draft tokens).
        chunks_prefills: Whether a prompt may be computed in parts, over several steps.
        max_chunk: Tokens of one prefill in the step, at most, as the operator has it; None for no
            limit.
        accepted_per_decode: Mean output tokens per decode step, >= 1.
        elapsed_s: Measured engine time since the previous plan, seconds.
        prefill_share: Recent share of engine time spent on prefill, in [0, 1).
        has_slo: Whether any live request has a target.
        has_e2e: Whether any live request has a target for its last token.
        has_classes: Whether the priorities of live requests may differ.
        trusts_predictions: Whether a row's own prediction is used; see `PredictionTrust`.
        services: Whose requests these are.
        traffic: What has come of late.
        lifts: By how many ranks the requests of each service go before those of its priority, as
            `Services.lifts`; None where no service is owed time.
        reload_s_per_token: What it takes to swap KV back in, seconds per token; ``inf`` where it
            is computed again, None where it is not known yet.
    """

    now_s: float
    table: RequestTable
    running: IntArray
    waiting: IntArray
    lengths: LengthModel
    cost: CostModel
    max_num_tokens: int
    max_num_running: int
    num_free_blocks: int
    num_blocks: int
    block_size: int
    tokens_per_decode: int = 1
    chunks_prefills: bool = True
    max_chunk: int | None = None
    accepted_per_decode: float = 1.0
    elapsed_s: float = 0.0
    prefill_share: float = 0.0
    has_slo: bool = True
    has_e2e: bool = False
    has_classes: bool = True
    trusts_predictions: bool = True
    services: Services = field(default_factory=Services)
    traffic: RecentTraffic = field(default_factory=RecentTraffic)
    lifts: IntArray | None = None
    reload_s_per_token: float | None = math.inf

    @property
    def num_ahead(self) -> IntArray:
        """Output tokens in flight for each row of `running`, same length."""
        ahead: IntArray = self.table.num_in_flight[self.running]
        return ahead

    @property
    def has_ranks(self) -> bool:
        """Whether some requests go before others, for their priority or what they are owed."""
        return self.has_classes or self.lifts is not None

    def rank_of(self, rows: IntArray) -> IntArray:
        """Ranks of `rows`, the smallest first: by priority, then by what their services are owed.

        The rank of a service decides who gets a free slot and the tokens of a step. Nobody who
        runs is displaced for it: that is for priorities alone.
        """
        rank: IntArray = self.table.priority[rows]
        if self.lifts is None:
            return rank
        return rank * len(self.lifts) - self.lifts[self.table.service[rows]]

    @property
    def are_decodes(self) -> bool:
        """Whether somebody runs, and all who do decode."""
        return len(self.running) > 0 and not self.table.num_in_phase[PREFILL]

    def decode_step_s(self, rows: IntArray) -> float:
        """Time of a step in which these rows decode and nothing else happens, seconds."""
        return float(self.cost.decode_s(len(rows), self.table.num_tokens(rows)))

    def remaining(self, rows: IntArray, num_ahead: IntArray | int = 0) -> FloatArray:
        """Predicted output tokens left (>= 1) for `rows`, after `num_ahead` in flight.

        From a row's own prediction where there is a trusted one, from `lengths` otherwise.
        """
        table = self.table
        output, limit = table.num_output[rows] + num_ahead, table.max_tokens[rows]
        left = self.lengths.remaining(table.length_class[rows], output, limit)
        if table.num_predicted and self.trusts_predictions:
            own, quantiles = self._own(rows)
            left[own] = _limited(
                remaining_mean(quantiles, output[own], left[own]), output[own], limit[own]
            )
        return left

    def surely_remaining(self, rows: IntArray, num_ahead: IntArray | int = 0) -> FloatArray:
        """Output tokens left (>= 1) that 95 % of such requests reach, as in `remaining`."""
        return self._remaining_at(_RARE, rows, num_ahead)

    def likely_remaining(self, rows: IntArray, num_ahead: IntArray | int = 0) -> FloatArray:
        """Equally likely values [n, 5] of the output tokens left (>= 1), as in `remaining`."""
        return np.stack([self._remaining_at(q, rows, num_ahead) for q in LIKELY], axis=1)

    def most_remaining(self, rows: IntArray, num_ahead: IntArray | int = 0) -> FloatArray:
        """The largest of the values of `likely_remaining` [n]."""
        return self._remaining_at(LIKELY[-1], rows, num_ahead)

    def _remaining_at(self, q: float, rows: IntArray, num_ahead: IntArray | int) -> FloatArray:
        table = self.table
        output, limit = table.num_output[rows] + num_ahead, table.max_tokens[rows]
        left = self.lengths.remaining_quantile(q, table.length_class[rows], output, limit)
        if table.num_predicted and self.trusts_predictions:
            own, quantiles = self._own(rows)
            left[own] = _limited(
                remaining_at(q, quantiles, output[own], left[own]), output[own], limit[own]
            )
        return left

    def _own(self, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """Places in `rows` of those with a prediction, and their quantiles."""
        quantiles = self.table.predicted[rows]
        own = np.flatnonzero(quantiles[:, 0] > 0.0)  # NaN: none
        return own, quantiles if len(own) == len(rows) else quantiles[own]


def _limited(left: FloatArray, num_output: IntArray, max_tokens: IntArray) -> FloatArray:
    result: FloatArray = np.maximum(np.minimum(left, max_tokens - num_output), 1.0)
    return result


@dataclass(slots=True)
class StepPlan:
    """What the engine does in one step.

    Attributes:
        run: Rows of running requests that take part, in order of service; None means all of
            them as they stand. A running row that is missing is held: it keeps its KV and its
            slot, and sits this step out.
        admit: Rows of waiting requests that may start, in order; None means all of them in the
            engine's own order.
        token_budget: Tokens of the step, >= 1; None means the engine's maximum.
        prefill_cap: Tokens of one prefill in the step, at most; None means no limit.
        preempt: Rows of running requests that give up slot and KV before the step.
        reject: Rows of waiting requests to end with an error.
        order: All running and waiting rows in the order in which they are to be served, for the
            estimated waits; None where the planner has no such order (see `ewt.queue_order`).
        promote_s: With `order`, seconds until aging lets each row be served next (ALISE Eq. 7).
        problem: Which problem was solved; for metrics and logs.
    """

    run: IntArray | None = None
    admit: IntArray | None = None
    token_budget: int | None = None
    prefill_cap: int | None = None
    preempt: IntArray = field(default_factory=lambda: _NO_ROWS)
    reject: IntArray = field(default_factory=lambda: _NO_ROWS)
    order: IntArray | None = None
    promote_s: FloatArray | None = None
    problem: str = "neutral"
