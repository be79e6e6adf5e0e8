"""Plain data between an engine and a planner: `StepState` in, `StepPlan` out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sola_sched.compiled.functions import BoolArray, FloatArray, IntArray
from sola_sched.core.services import Services
from sola_sched.core.table import (
    DECODE,
    FREE,
    PARKED,
    PREFILL,
    REQUEST,
    WAITING,
    RequestTable,
)
from sola_sched.core.traffic import RecentTraffic
from sola_sched.cost.model import CostModel
from sola_sched.prediction.length import (
    LengthLines,
    remaining_at,
    remaining_mean,
)

__all__ = [
    "DECODE", "FREE", "PARKED", "PREFILL", "REQUEST", "WAITING", "BoolArray", "FloatArray",
    "IntArray", "RequestTable",
]  # fmt: skip

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)

#: Share of requests that may end before `StepState.surely_remaining`.
_RARE = 0.05
#: Probabilities of `StepState.likely_remaining`: the middles of equal parts of the mass.
LIKELY = (0.1, 0.3, 0.5, 0.7, 0.9)


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


class EngineLimits(NamedTuple):
    """What seldom changes of an engine.

    Attributes:
        max_num_tokens: Largest token budget of a step.
        max_num_running: Slots.
        num_blocks, block_size: KV cache; its size in blocks, a block's in tokens.
        tokens_per_decode: Tokens a decode occupies in the budget (1 + draft tokens).
        chunks_prefills: Whether a prompt may be computed in parts, over several steps.
        max_chunk: Tokens of one prefill in the step, at most, as the operator has it; None for no
            limit.
    """

    max_num_tokens: int
    max_num_running: int
    num_blocks: int
    block_size: int
    tokens_per_decode: int = 1
    chunks_prefills: bool = True
    max_chunk: int | None = None


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
        num_free_blocks: Of the KV cache.
        num_leaving_blocks: Of those who have left, free once their copies to the host have ended.
        max_num_tokens ... max_chunk: As in `EngineLimits`.
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
    num_leaving_blocks: int = 0

    @property
    def num_free_soon(self) -> int:
        """KV blocks that are free, or will be without anybody else leaving."""
        return self.num_free_blocks + self.num_leaving_blocks

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
        is_settled: Nothing can be decided until a request comes, ends or enters another phase:
            nobody waits, and all who run decode well within their targets, or nobody has a target,
            or step times are unknown.
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
    is_settled: bool = False
