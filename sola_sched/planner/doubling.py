"""`policy="doubling"`: requests of services that take little time first, on budgets that double.

Source: SeaLLM (Zhao et al., 2025), section 4.2, Eq. 7 and Algorithm 2. Requests of a service take
the mean time L_s with standard deviation Var_s. A request starts with the budget Q = L_s + Var_s,
spends it as it is executed, and gets twice the one before when it is spent. Its priority is
``O_r = Q_r L_s`` with the budget Q_r that is left; the smallest goes first. That minimizes the mean
normalized latency, latency / L_s, as long as budgets tell what is left: at any moment for those
that are there (Theorem 2), and with whatever arrives for two services (Theorem 1; the paper's
placement puts no more on one engine). With three it was up to 2 % above the best in small cases.
Requests that starve go before all others.

Departures, and why:

- L_s and Var_s are of the last requests of each service, by their lengths and the step-time model,
  instead of a profile: they follow the load and the engine. A service without enough of them has
  the mean of what is predicted of its requests.
- A batch mixes services and phases. One engine computes several adapters in a step, and a step for
  each would read the weights again for each.
- A request that runs gives up its KV only if that is worth computing it again: with Eq. 10, if it
  lowers the sum of normalized latencies by more than that costs. The paper swaps all KV instead.
"""

from __future__ import annotations

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import BoolArray, FloatArray, IntArray, StepState
from sola_sched.cost.execution import ExecutionTime
from sola_sched.planner.levels import PriorityLevels
from sola_sched.planner.preemptive import PreemptivePlanner
from sola_sched.planner.preemptive_step import MIN_GAIN, PreemptiveStep, Recompute

#: Ended requests of a service that its time is known from.
_MIN_ENDED = 8
#: Plans after which the times of the services are computed again.
_REVIEW_PLANS = 32
_TINY_S = 1e-9


def budget_left_s(executed_s: FloatArray, budget_s: FloatArray) -> FloatArray:
    """What is left of the budget Q_r of each request, which doubles whenever it is spent, [n].

    Budgets Q, 2 Q, 4 Q, ... follow each other, so before number k requests have spent (2^k - 1) Q.

    Args:
        executed_s: For which each request has been executed, seconds, >= 0.
        budget_s: Its first budget Q, seconds, > 0.
    """
    number = np.floor(np.log2(executed_s / budget_s + 1.0))
    left: FloatArray = (np.exp2(number + 1.0) - 1.0) * budget_s - executed_s
    # Where one is just spent, rounding must not leave nothing.
    return np.maximum(left, _TINY_S)


def service_times(
    state: StepState, rows: IntArray, left: FloatArray, time: ExecutionTime
) -> FloatArray:
    """Mean and standard deviation [2, num_services] of each service's execution times, seconds.

    Args:
        state: The step's state.
        rows: All live rows.
        left: Predicted output tokens left of each.
        time: Execution times.
    """
    services, table = state.services, state.table
    service = table.service[rows]
    prompt, output = table.num_prompt[rows], table.num_output[rows] + left
    live_s = _executed_s(time, prompt, prompt, output)
    times = np.zeros((2, len(services)))
    times[0] = live_s.mean() if len(rows) else 1.0
    for index in range(len(services)):
        ended = services.lengths_of(index)
        if len(ended) >= _MIN_ENDED:
            seconds = _executed_s(time, ended[:, 0], ended[:, 0], ended[:, 1])
            times[:, index] = seconds.mean(), seconds.std()
        elif (mine := service == index).any():
            times[0, index] = live_s[mine].mean()
    return np.maximum(times, [[_TINY_S], [0.0]])


def _executed_s(
    time: ExecutionTime,
    num_computed: IntArray,
    num_prompt: IntArray,
    num_output: IntArray | FloatArray,
) -> FloatArray:
    """What so many tokens of prompts and outputs take, seconds."""
    output = np.asarray(num_output, dtype=np.float64)
    prefill_s = time.prefill_s(np.asarray(num_computed, dtype=np.float64), np.zeros(1))
    return prefill_s + time.decode_s(num_prompt, output)


class DoublingPlanner(PreemptivePlanner):
    """Serves the requests with the smallest O_r first; see the module.

    Args:
        config: `aging_s`, the starvation threshold, and `overload` are used.
    """

    traits = PolicyTraits(options=("aging_s", "overload"), goes_by_targets=False, gives_shares=True)

    def __init__(self, config: SolaConfig) -> None:
        super().__init__(config)
        self.levels = PriorityLevels(1, config.aging_seconds)
        self._times: FloatArray = np.zeros((2, 0))
        self._num_since = 0

    def _step(self, state: StepState, rows: IntArray, took_part: BoolArray) -> DoublingStep:
        step = DoublingStep(state, rows, self._batch, self._again)
        self._num_since += 1
        num_services = self._times.shape[1]
        if num_services != len(state.services) or self._num_since >= _REVIEW_PLANS:
            self._times, self._num_since = service_times(state, rows, step.left, step.time), 0
        step.put_in_order(self._times, self.levels, took_part)
        return step


class DoublingStep(PreemptiveStep):
    """One step's decision, in the order of O_r.

    Attributes:
        usual_s: L_s of the service of each row, seconds.
        urgency: O_r = Q_r L_s, seconds squared; the smallest goes first.
        starved: Whether a row has been without service for the threshold.
    """

    def __init__(self, state: StepState, rows: IntArray, batch: float, again: Recompute) -> None:
        super().__init__(state, rows, batch, again)
        self.usual_s = self.urgency = np.zeros(len(rows))
        self.starved: BoolArray = np.zeros(len(rows), dtype=np.bool_)

    def put_in_order(self, times: FloatArray, levels: PriorityLevels, took_part: BoolArray) -> None:
        """Decide who goes first; call once, before `plan`.

        Args:
            times: Mean and standard deviation of each service, as `service_times`.
            levels: The one level of all, with their ages.
            took_part: Which rows took part in the step before.
        """
        table, rows = self.state.table, self.rows
        self.usual_s, spread_s = times[:, table.service[rows]]
        has_begun = self.holds | (table.num_output[rows] > 0)
        num_prompt = table.num_prompt[rows]
        computed = np.where(self.is_decode, num_prompt, table.num_computed[rows])
        computed = np.where(self.holds, np.minimum(computed, num_prompt), num_prompt)
        num_output = self.ctx - num_prompt
        executed_s = _executed_s(self.time, computed, num_prompt, np.maximum(num_output, 0))
        executed_s = np.where(has_begun, executed_s, 0.0)
        left_s = budget_left_s(executed_s, self.usual_s + spread_s)
        self.urgency = left_s * self.usual_s
        age_s = levels.age(table, rows, took_part, self.usual_s, self.state.now_s)
        self.starved = age_s >= levels.aging_s
        self.promote_s = np.maximum(levels.aging_s - age_s, 0.0)
        keys = [np.where(self.starved, -age_s, self.urgency), ~self.starved]
        if self.state.has_ranks:
            keys.append(self.state.rank_of(rows))
        self.order = np.lexsort(keys)

    def _gains(self, holder: int, other: int) -> bool:
        if self.starved[holder] or self.urgency[other] >= self.urgency[holder]:
            return bool(self.starved[other] and not self.starved[holder])
        if self.starved[other]:
            return True
        # The difference of normalized latencies (Eq. 10), times L_s of both.
        gain = self.urgency[holder] - self.urgency[other]
        cost_s = MIN_GAIN * self._again_s(np.array([holder]))
        return bool(gain > cost_s * self.usual_s[other])
