"""The optimum of Aladdin's mixed integer program, for small cases: how far is best fit from it?

Source: Aladdin, section 4.2, constraints (a) to (h), solved by HiGHS. (b) is linear in x, because
l_d is linear in the number of requests: with theta l_d(b) = theta (T_dec - c3 - c2 b) / k2 it reads

    sum_j x_ij (l_in + gamma l_out + theta c2 / k2) <= theta (T_dec - c3) / k2

less what is on the instance already. As in the paper all new requests have the same two targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from sola_sched.cluster.placement.best_fit import why_infeasible
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.fleet import Fleet, Phase
from sola_sched.errors import ConfigError, InfeasibleError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExactPlacement:
    """The answer of the solver.

    Attributes:
        instances: Of each request.
        num_used: Instances with requests, those that had some before included.
        is_optimal: False if the time ran out first; the answer is feasible then.
    """

    instances: list[int]
    num_used: int
    is_optimal: bool


def place_exactly(
    fleet: Fleet,
    demands: Sequence[Demand],
    *,
    prices: Sequence[float] | None = None,
    time_limit_s: float = 60.0,
) -> ExactPlacement:
    """The placement with the fewest (or cheapest) instances; the fleet stays as it is.

    Args:
        fleet: The instances, with what is on them.
        demands: New requests, all with the same targets.
        prices: Of each instance in use, > 0; None for 1 each.
        time_limit_s: When the solver gives up improving.

    Raises:
        ConfigError: Targets differ, or a price is not > 0.
        InfeasibleError: There is no placement, or none was found in time.
    """
    _check(fleet, demands, prices)
    program = _Program(fleet, demands)
    n, num_x = len(fleet), len(demands) * len(fleet)
    cost = np.zeros(num_x + n)
    cost[num_x:] = 1.0 if prices is None else np.asarray(prices, dtype=np.float64)
    lowest = np.zeros(num_x + n)
    lowest[num_x:] = fleet.num_requests > 0.0
    highest = np.ones(num_x + n)
    highest[num_x:] = fleet.is_open
    solved = milp(
        cost,
        integrality=np.ones(num_x + n),
        bounds=Bounds(lowest, np.maximum(lowest, highest)),
        constraints=program.constraints(),
        options={"time_limit": time_limit_s},
    )
    if solved.x is None:
        reasons = {why_infeasible(fleet, demand) for demand in demands[:1]}
        raise InfeasibleError(
            f"{len(demands)} requests must fit on {n} instances ({solved.message}); "
            f"for the first alone: {'; '.join(reasons)}."
        )
    x = solved.x[:num_x].reshape(len(demands), n)
    instances = x.argmax(axis=1).tolist()
    num_used = len({*instances, *np.flatnonzero(fleet.num_requests > 0.0).tolist()})
    return ExactPlacement(instances, num_used, solved.status == 0)


class _Program:
    """Rows of the program: coefficients of x (request by request) and y, and upper bounds."""

    def __init__(self, fleet: Fleet, demands: Sequence[Demand]) -> None:
        self.fleet, self.demands = fleet, demands
        self.n = len(fleet)
        self.num_x = len(demands) * self.n
        self.rows: list[tuple[list[int], list[float], float]] = []
        self.starts = np.array([d.prompt_tokens for d in demands], dtype=np.float64)
        self.outputs = np.array([d.output_tokens for d in demands], dtype=np.float64)
        if fleet.phase is Phase.PREFILL:
            self.outputs[:] = 0.0

    def constraints(self) -> list[LinearConstraint]:
        for i in range(self.n):
            columns = [j * self.n + i for j in range(len(self.demands))]
            if self.fleet.phase is not Phase.PREFILL:
                self._context(i, columns)
            if self.fleet.phase is not Phase.DECODE:
                self._prompts(i, columns)
            self._memory(i, columns)
            slots = float(self.fleet.max_requests[i] - self.fleet.num_requests[i])
            self._add(columns, [1.0] * len(columns), slots)
            for column in columns:  # (f)
                self._add([column, self.num_x + i], [1.0, -1.0], 0.0)
        matrix = lil_array((len(self.rows), self.num_x + self.n))
        for number, (columns, values, _) in enumerate(self.rows):
            matrix[number, columns] = values
        uppers = np.array([upper for _, _, upper in self.rows])
        once = lil_array((len(self.demands), self.num_x + self.n))
        for j in range(len(self.demands)):  # (a)
            once[j, j * self.n : (j + 1) * self.n] = 1.0
        return [
            LinearConstraint(matrix.tocsr(), -np.inf, uppers),
            LinearConstraint(once.tocsr(), 1.0, 1.0),
        ]

    def _add(self, columns: list[int], values: list[float], upper: float) -> None:
        # An instance that is over a limit already takes nothing new; it may keep what it has.
        if np.isfinite(upper):
            self.rows.append((columns, values, max(upper, 0.0)))

    def _context(self, i: int, columns: list[int]) -> None:  # (b)
        fleet, model = self.fleet, self.fleet.models[i].decode
        gamma, theta = fleet.tightness.gamma, fleet.tightness.theta
        tpot_s = min(float(fleet.tpot_s[i]), self.demands[0].tpot_s)
        per_ctx_s = max(model.per_ctx_s, 1e-18)
        weights = self.starts + gamma * self.outputs + theta * model.per_request_s / per_ctx_s
        room_s = tpot_s - model.base_s - model.per_request_s * float(fleet.num_requests[i])
        self._add(columns, weights.tolist(), theta * room_s / per_ctx_s - float(fleet.context[i]))

    def _prompts(self, i: int, columns: list[int]) -> None:  # (c), (d)
        fleet, model = self.fleet, self.fleet.models[i].prefill
        before_s = model.per_token_s * float(fleet.new_tokens[i])
        limits = [self.demands[0].ttft_s]
        if fleet.phase is Phase.BOTH:
            limits.append(fleet.tightness.theta * float(fleet.bank_s[i]))
        weights = model.per_token_s * self.starts
        for j in range(len(columns)):
            # c1 is due if there is a new request, whichever: one row for each.
            with_base = weights.copy()
            with_base[j] += model.base_s
            self._add(columns, with_base.tolist(), min(limits) - before_s)

    def _memory(self, i: int, columns: list[int]) -> None:  # (e)
        held, left = self.fleet.requests_of(i)
        fixed = self.fleet.models[i].kv_tokens_per_request
        for end in np.unique(np.concatenate([left, self.outputs])):
            used = float((held + end)[left >= end].sum())
            free = float(self.fleet.kv_capacity[i]) - used
            grown = self.starts + fixed + end
            values = np.where((self.outputs >= end) | (free < 0.0), grown, 0.0)
            self._add(columns, values.tolist(), free)


def _check(fleet: Fleet, demands: Sequence[Demand], prices: Sequence[float] | None) -> None:
    targets = {(demand.ttft_s, demand.tpot_s) for demand in demands}
    if len(targets) != 1:
        raise ConfigError(
            f"The program takes requests with the same targets (got {len(targets)} pairs from "
            f"{len(demands)} requests); solve each class alone."
        )
    if prices is not None and (
        len(prices) != len(fleet) or not all(0.0 < price < np.inf for price in prices)
    ):
        raise ConfigError(
            f"'prices' must have a finite number > 0 for each of {len(fleet)} instances "
            f"(got {list(prices)!r})."
        )
