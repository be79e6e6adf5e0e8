"""SOLA to the letter: the baseline `policy="paper"`.

Source: SOLA (Hong et al., MLSys 2025), sections 4.1 to 4.4 and 5.1.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, FloatArray, IntArray, StepPlan, StepState
from sola_sched.planner.base import (
    learning,
    num_that_fit,
    priority_victims,
    with_memory_victims,
    with_useful_victims,
    without_targets,
)

#: KV use below which the peak-memory prediction is skipped (section 6.4).
_MEMORY_THRESHOLD = 0.5
#: New KV blocks of a decode in one step, at most: one for each kind of attention layer.
_BLOCKS_PER_DECODE = 4


class PaperPlanner:
    """Each step minimizes the worst TTFT subject to TPOT, or the reverse (Table 2).

    The less fulfilled latency is optimized and the other one is the constraint. When both fail,
    the constraint's maximum becomes the a %-level maximum, a being the share of requests that
    satisfy it (section 4.4.1); the latency with the larger share is the constraint.

    Where the paper is silent: p_TTFT is taken over requests without a first token and p_TPOT over
    requests that decode, since only those can still change; both as ratios to each request's own
    target, so that targets may differ; the sliding window compares the mean ratios of the last
    `window` steps; where no request has a TTFT target, prompts get what TPOT leaves, and while
    nobody decodes one prompt at least is computed; preemption, which Algorithm 1 leaves out, is
    vLLM's, but a request of a higher class of priority displaces lower ones. While slots are full
    and memory is ample the order of the decodes decides nothing, and is left alone.

    Args:
        config: `window`, `tile` and the targets are used.
    """

    traits = PolicyTraits(options=("tile", "window"))

    def __init__(self, config: SolaConfig) -> None:
        self.tile = config.tile
        self._ratios: deque[tuple[float, float]] = deque(maxlen=config.window)

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.has_slo:
            return without_targets(state)
        if not state.cost.is_ready:
            return learning(state)
        ratios = self._ratios

        def attempt(state: StepState, victims: IntArray) -> StepPlan:
            self._ratios = ratios.copy()
            return self._plan(state, victims)

        plan = with_useful_victims(state, priority_victims(state), attempt)
        noted = self._ratios
        better = with_memory_victims(state, plan, attempt, state.remaining)
        if better is None:
            self._ratios = noted
        return better or plan

    def _plan(self, state: StepState, victims: IntArray) -> StepPlan:
        table, rows = state.table, state.running
        if len(victims):
            rows = rows[~np.isin(rows, victims)]
        is_decode = table.phase[rows] == DECODE
        if not len(state.waiting) and is_decode.all():  # no prefill: nothing to weigh
            return StepPlan(preempt=victims, problem="tpot")
        decodes, prefills = rows[is_decode], rows[~is_decode]
        slots = state.max_num_running - len(rows)
        ttft_s, ttft_limit = self._ttft(state, np.concatenate([prefills, state.waiting]))
        tpot_s = self._tpot(state, decodes)
        tpot_limit = table.tpot_s[decodes]
        ratio_ttft, ratio_tpot = ttft_s / ttft_limit, tpot_s / tpot_limit
        self._ratios.append((ratio_ttft.max(initial=0.0), ratio_tpot.max(initial=0.0)))
        optimize_ttft, level_ttft, level_tpot = self._problem(ratio_ttft, ratio_tpot)
        if np.isinf(ttft_limit).all():  # no TTFT to meet: prompts get what TPOT leaves (Eq. 1)
            optimize_ttft = True

        if not len(prefills) and slots <= 0:  # nobody can start: the step has no prefill
            order = None
            if not self._all_run(state, decodes):
                order = self._by_tpot(state, decodes, tpot_s, state.remaining(decodes))
            return StepPlan(
                run=order,
                admit=rows[:0],
                preempt=victims,
                problem="ttft" if optimize_ttft else "tpot",
            )

        remaining = state.remaining(rows)
        ordered_decodes = self._by_tpot(state, decodes, tpot_s, remaining[is_decode])
        pending = np.concatenate([prefills, state.waiting])
        new = (table.prefill_target[pending] - table.num_computed[pending]).astype(np.float64)
        has = table.num_computed[pending].astype(np.float64)
        chunk = new if state.max_chunk is None else np.minimum(new, state.max_chunk)
        prefill_s = np.asarray(state.cost.prefill_s(new, has))
        late_s = ttft_s + prefill_s - ttft_limit
        by_ttft = np.lexsort((-ttft_s, -late_s, table.priority[pending]))
        num_decode_tokens = state.tokens_per_decode

        if optimize_ttft:
            seconds = self._eq1_seconds(state, decodes, tpot_s, ratio_tpot, level_tpot)
            budget = self._tiles(state, seconds, chunk[by_ttft], has[by_ttft])
            left = max(0, budget - int(chunk.sum())) if len(pending) else state.max_num_tokens
            run_decodes = ordered_decodes[: left // num_decode_tokens]
            if not budget:  # nothing may be added: Eq. 1 leaves only the decodes
                run_decodes, budget = ordered_decodes, len(decodes) * num_decode_tokens
                by_ttft = by_ttft[:0]
            chosen = by_ttft
            problem = "ttft"
        else:
            count = self._eq2_count(
                state, decodes, ttft_s, ttft_limit, prefill_s, by_ttft, level_ttft
            )
            chosen = by_ttft[: max(count, len(victims), 1 if not len(decodes) else 0)]
            run_decodes, budget = ordered_decodes, state.max_num_tokens
            problem = "tpot"

        is_waiting = chosen >= len(prefills)
        run_prefills = pending[chosen[~is_waiting]]
        index = (chosen[is_waiting] - len(prefills))[:slots]
        index = index[: self._fits(state, rows, remaining, index)]
        if optimize_ttft and not len(run_prefills) and not len(index):
            run_decodes, budget = ordered_decodes, state.max_num_tokens
        run = (
            np.concatenate([run_prefills, run_decodes])
            if optimize_ttft
            else np.concatenate([run_decodes, run_prefills])
        )
        return StepPlan(
            run=run,
            admit=state.waiting[index],
            token_budget=int(np.clip(budget, 1, state.max_num_tokens)),
            preempt=victims,
            problem=problem,
        )

    @staticmethod
    def _all_run(state: StepState, decodes: IntArray) -> bool:
        """Whether tokens and memory suffice for every decode, in whatever order."""
        tokens = state.tokens_per_decode
        blocks = len(decodes) * _BLOCKS_PER_DECODE * (1 + tokens // state.block_size)
        return len(decodes) * tokens <= state.max_num_tokens and blocks <= state.num_free_blocks

    # State (section 4.3) --------------------------------------------------------------------

    @staticmethod
    def _ttft(state: StepState, pending: IntArray) -> tuple[FloatArray, FloatArray]:
        table = state.table
        return state.now_s - table.arrival_s[pending], table.ttft_s[pending]

    @staticmethod
    def _tpot(state: StepState, decodes: IntArray) -> FloatArray:
        """Real-time TPOT: decode time so far per token after the first, seconds."""
        table = state.table
        first = np.nan_to_num(table.first_token_s[decodes], nan=state.now_s)
        tpot: FloatArray = (state.now_s - first) / np.maximum(table.num_output[decodes], 1)
        return tpot

    @staticmethod
    def _by_tpot(
        state: StepState, decodes: IntArray, tpot_s: FloatArray, left: FloatArray
    ) -> IntArray:
        """Decodes by predicted TPOT, the worst first (section 4.4.2).

        Predicted is (t_TPOT * l_out + C^d(Q_run) * l_left) / (l_out + l_left).
        """
        table = state.table
        ctx = table.num_prompt[decodes].sum() + table.num_output[decodes].sum()
        step_s = float(state.cost.decode_s(len(decodes), ctx))
        out = table.num_output[decodes]
        predicted = (tpot_s * out + step_s * left) / np.maximum(out + left, 1)
        ordered: IntArray = decodes[np.argsort(-predicted)]
        return ordered

    # Strategy (section 4.4) -----------------------------------------------------------------

    def _problem(self, ratio_ttft: FloatArray, ratio_tpot: FloatArray) -> tuple[bool, float, float]:
        """Table 2: (optimize TTFT?, level of the TTFT maximum, level of the TPOT maximum)."""
        mean_ttft = float(np.mean([r[0] for r in self._ratios]))
        mean_tpot = float(np.mean([r[1] for r in self._ratios]))
        if mean_ttft > 1 and mean_tpot > 1:
            share_ttft = float((ratio_ttft <= 1).mean()) if len(ratio_ttft) else 1.0
            share_tpot = float((ratio_tpot <= 1).mean()) if len(ratio_tpot) else 1.0
            return share_tpot >= share_ttft, share_ttft, share_tpot
        return mean_ttft > mean_tpot, 1.0, 1.0

    @staticmethod
    def _eq1_seconds(
        state: StepState,
        decodes: IntArray,
        tpot_s: FloatArray,
        ratio_tpot: FloatArray,
        level: float,
    ) -> float:
        """Largest C^p(Q_run) with max_r (t_TPOT + C^p / l_out) <= T_TPOT (Eq. 1), seconds."""
        table = state.table
        slack = (table.tpot_s[decodes] - tpot_s) * np.maximum(table.num_output[decodes], 1)
        if level < 1.0:
            slack = slack[ratio_tpot <= 1.0]
        return float(slack.min(initial=np.inf))

    def _tiles(self, state: StepState, seconds: float, new: FloatArray, has: FloatArray) -> int:
        """k_i: the largest multiple of the tile whose prefill takes at most `seconds`."""
        if not len(new) or seconds <= 0:
            return 0
        ends = np.cumsum(new)
        total = min(float(ends[-1]), state.max_num_tokens)
        low, high = 0, int(np.ceil(total / self.tile))
        while low < high:
            middle = (low + high + 1) // 2
            chunk = np.clip(middle * self.tile - (ends - new), 0, new)
            used = chunk > 0
            cost_s = float(np.sum(state.cost.prefill_marginal_s(chunk[used], has[used])))
            cost_s += float(state.cost.prefill_s(0.0, 0.0))
            low, high = (middle, high) if cost_s <= seconds else (low, middle - 1)
        return min(low * self.tile, state.max_num_tokens)

    @staticmethod
    def _eq2_count(
        state: StepState,
        decodes: IntArray,
        ttft_s: FloatArray,
        limit: FloatArray,
        prefill_s: FloatArray,
        order: IntArray,
        level: float,
    ) -> int:
        """n_i: the fewest prefills such that the others still meet T_TTFT (Eq. 2)."""
        if not len(order):
            return 0
        table = state.table
        ctx = table.num_prompt[decodes].sum() + table.num_output[decodes].sum()
        decode_s = float(state.cost.decode_s(len(decodes), ctx)) if len(decodes) else 0.0
        step_s = decode_s + np.concatenate([[0.0], np.cumsum(prefill_s[order])])
        lateness = (ttft_s + prefill_s - limit)[order]
        if level < 1.0:
            lateness = np.where((ttft_s <= limit)[order], lateness, -np.inf)
        # worst[n]: the worst lateness among the requests left out when n are taken.
        worst = np.append(np.maximum.accumulate(lateness[::-1])[::-1], -np.inf)
        return int(np.argmax(worst + step_s <= 0)) if (worst + step_s <= 0).any() else len(order)

    @staticmethod
    def _fits(state: StepState, running: IntArray, growth: FloatArray, index: IntArray) -> int:
        """Peak-memory check before admission (Algorithm 1, line 7; section 5.1)."""
        if not len(index):
            return 0
        used = 1.0 - state.num_free_blocks / max(1, state.num_blocks)
        need = state.table.prefill_target[state.waiting[index]].sum() / state.block_size
        if used + need / max(1, state.num_blocks) < _MEMORY_THRESHOLD:
            return len(index)
        left = np.concatenate([growth, state.remaining(state.waiting[index])])
        return num_that_fit(state, running, index, left)
