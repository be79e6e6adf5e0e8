"""Whose step is next among services that share GPUs: SeaLLM's rule, ours and the baselines.

A turn is a step of one service. All of its requests that run are in it, and as many prompt tokens
as the step has room for: vLLM batches both phases. SeaLLM batches requests of one phase only
(Algorithm 2, lines 12 to 20); here a rule ranks services by their most urgent request, and the
others of that service ride along.
"""

from __future__ import annotations

import math
from typing import Protocol

from sola_sched.cluster.sharing.queue import ServiceQueue, SharedRequest

Rank = tuple[float, float]


class TurnRule(Protocol):
    """Ranks services.

    Attributes:
        is_round: Every service that has work gets a step in each round, whatever its rank.
    """

    is_round: bool

    def rank(self, queue: ServiceQueue, now_s: float) -> Rank:
        """The service with the smallest rank has the turn; asked only if it has work."""

    def until_s(self, queue: ServiceQueue) -> float:
        """Seconds of the service's own steps after which its rank may have become worse."""

    def sort_out(self, queue: ServiceQueue, now_s: float) -> None:
        """Move waiting requests that are given up to `late`."""


class _Rule:
    is_round = False

    def until_s(self, queue: ServiceQueue) -> float:
        return math.inf

    def sort_out(self, queue: ServiceQueue, now_s: float) -> None:
        """Nobody is given up."""


class FirstCome(_Rule):
    """The service whose oldest request came first: AlpaServe and Clockwork, as in section 6.1."""

    def rank(self, queue: ServiceQueue, now_s: float) -> Rank:
        """See `TurnRule.rank`."""
        return _oldest_s(queue), 0.0


class RoundRobin(FirstCome):
    """A step of each in turn: MuxServe's rule for prefill, and its decodes in parallel.

    MuxServe also gives each service a share of the GPU's multiprocessors, which lengthens its
    prefill; that is left out, to its advantage.
    """

    is_round = True


def budget_left(executed_s: float, budget_s: float) -> float:
    """Seconds left of a budget that is doubled whenever it is spent (section 4.2).

    The budgets are Q, 2 Q, 4 Q, ...; after n of them (2^n - 1) Q have been executed.
    """
    doublings = max(0, math.floor(math.log2(executed_s / budget_s + 1.0) + 1e-12))
    spent_s = (math.pow(2.0, doublings + 1) - 1.0) * budget_s
    return max(0.0, spent_s - executed_s)


class DoublingBudget(_Rule):
    """SeaLLM's Algorithm 2: O_r = Q_r L_s, the smallest first, a starved service before all.

    Q_r is what is left of the request's budget L_s + Var_s, which doubles when it is spent.

    Args:
        starved_after: Mean execution times without a turn after which a service is starved. The
            paper leaves the threshold open.
    """

    def __init__(self, starved_after: float = 20.0) -> None:
        self._starved_after = starved_after

    def rank(self, queue: ServiceQueue, now_s: float) -> Rank:
        """See `TurnRule.rank`."""
        mean_s = queue.habits.mean_s
        if now_s - queue.served_s > self._starved_after * mean_s:
            return 0.0, queue.served_s
        return 1.0, self._least_left_s(queue) * mean_s

    def until_s(self, queue: ServiceQueue) -> float:
        """Until the first budget is spent."""
        left = [self._left_s(queue, request) for request in queue.running.values()]
        return min(left, default=math.inf)

    def _least_left_s(self, queue: ServiceQueue) -> float:
        left_s = math.inf if queue.running else queue.habits.mean_s + queue.habits.std_s
        for request in queue.running.values():
            left_s = min(left_s, self._left_s(queue, request))
        if queue.waiting:
            left_s = min(left_s, self._left_s(queue, queue.waiting[0]))
        return left_s

    def _left_s(self, queue: ServiceQueue, request: SharedRequest) -> float:
        budget_s = queue.habits.mean_s + queue.habits.std_s
        return budget_left(queue.executed_s(request), budget_s)


class SkipJoin(_Rule):
    """Skip-join multi-level feedback queues (FastServe, Wu et al. 2023), by service.

    A request joins the level whose quantum holds its prefill, and goes down one level whenever it
    has run for a quantum; the quantum doubles from level to level.

    Args:
        quantum_s: Of the first level.
    """

    def __init__(self, quantum_s: float = 0.1) -> None:
        self._quantum_s = quantum_s

    def rank(self, queue: ServiceQueue, now_s: float) -> Rank:
        """See `TurnRule.rank`: the best level of a request, then the oldest of that level."""
        best = (math.inf, math.inf)
        for request in (*queue.running.values(), *list(queue.waiting)[:1]):
            best = min(best, (self._level(queue, request), request.arrival_s))
        return best

    def until_s(self, queue: ServiceQueue) -> float:
        """Until a request of the best level leaves it."""
        levels = [(self._level(queue, r), queue.executed_s(r)) for r in queue.running.values()]
        if not levels:
            return math.inf
        best = min(levels)[0]
        return max(0.0, self._end_s(best) - max(s for level, s in levels if level == best))

    def _level(self, queue: ServiceQueue, request: SharedRequest) -> float:
        prefill_s = request.prompt * queue.habits.prefill_token_s
        first = math.ceil(math.log2(max(1.0, prefill_s / self._quantum_s)))
        executed_s = queue.executed_s(request)
        return max(first, math.floor(math.log2(executed_s / self._quantum_s + 1.0) + 1e-12))

    def _end_s(self, level: float) -> float:
        return self._quantum_s * (math.pow(2.0, level + 1.0) - 1.0)


class LeastSlack(_Rule):
    """Who must start soonest to be in time, if that is soon; else by `DoublingBudget`.

    As `attain` does within an engine: what cannot be on time any more gets what time is left over.
    While nobody is in a hurry the doubling budget's order lowers the latency.

    Args:
        quantum_s: How long a turn is at most: slack shrinks for those who wait.
        hurry: A service is in a hurry if a request's slack is below so many of its mean execution
            times.
    """

    def __init__(self, quantum_s: float = 0.25, hurry: float = 1.0) -> None:
        self._quantum_s, self._hurry = quantum_s, hurry
        self._order = DoublingBudget(math.inf)

    def rank(self, queue: ServiceQueue, now_s: float) -> Rank:
        """See `TurnRule.rank`."""
        latest_s = math.inf
        for request in (*queue.running.values(), *queue.waiting):
            starts_s = queue.latest_start_s(request, now_s)
            if now_s <= starts_s < latest_s:
                latest_s = starts_s
        if latest_s - now_s < self._hurry * queue.habits.mean_s:
            return 0.0, latest_s
        by_budget = self._order.rank(queue, now_s)[1]
        return (1.0 if latest_s < math.inf else 2.0), by_budget

    def until_s(self, queue: ServiceQueue) -> float:
        """See the class."""
        return self._quantum_s

    def sort_out(self, queue: ServiceQueue, now_s: float) -> None:
        """Give up what waits and cannot end in time."""
        kept: list[SharedRequest] = []
        for request in queue.waiting:
            is_lost = queue.latest_start_s(request, now_s) < now_s
            (queue.late if is_lost else kept).append(request)
        if len(kept) < len(queue.waiting):
            queue.waiting.clear()
            queue.waiting.extend(kept)


def _oldest_s(queue: ServiceQueue) -> float:
    oldest_s = min((r.arrival_s for r in queue.running.values()), default=math.inf)
    for line in (queue.waiting, queue.late):
        if line:
            oldest_s = min(oldest_s, line[0].arrival_s)
    return oldest_s
