"""The cheapest configuration that attains.

Trying all combinations would take hours, so the search goes by parts, each tried for no more than
the cheapest that has attained so far costs:

1. each GPU type and degree with the first scheduler, slots and router: the least number;
2. where that comes near to the cheapest: every other scheduler and chunk;
3. the best of these: other numbers of slots, then every other router;
4. where it comes near: a prefill and a decode pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sola_sched.plan.search.configurations import Configuration
from sola_sched.plan.search.evaluate import Outcome

#: A GPU type and degree is tried with other options while its cost is within this of the best's.
_NEAR = 1.5
#: Options that are tried with other slots and with every router.
_NUM_LEADING = 3


class Evaluate(Protocol):
    """What a configuration does to the load."""

    def __call__(self, configuration: Configuration) -> Outcome:
        """All of it."""

    def prefill_share(self, configuration: Configuration) -> float:
        """What its prefill pool does: the share of first tokens in time."""


@dataclass
class Search:
    """One search.

    Args:
        choices: Every combination with one instance, the default one of each place first.
        evaluate: The test.
        goal: Attainment wanted.
        max_gpus: In all.
        has_pools: Whether prefill and decode pools are tried.

    Attributes:
        seen: What was evaluated.
    """

    choices: Sequence[Configuration]
    evaluate: Evaluate
    goal: float
    max_gpus: int
    has_pools: bool = False
    seen: dict[Configuration, Outcome] = field(default_factory=dict)

    def run(self) -> list[Outcome]:
        """Outcomes of what was tried, cheapest first, the better first at one price."""
        firsts: dict[tuple[str, int], Configuration] = {}
        for choice in self.choices:
            firsts.setdefault(_place(choice), choice)
        costs = {}
        for place, choice in firsts.items():
            least = self._least(choice, self.max_gpus // choice.tensor_parallel)
            costs[place] = math.inf if least is None else least * choice.cost_per_hour
        slots, router = self.choices[0].max_num_seqs, self.choices[0].router
        options = [c for c in self.choices if (c.max_num_seqs, c.router) == (slots, router)]
        for choice in options:
            if choice not in firsts.values() and self._is_near(choice, costs):
                self._fewer(self._most(choice), choice.times)
        self._vary("max_num_seqs")
        self._vary("router")
        if self.has_pools:
            for choice in _for_pools(options):
                if self._is_near(choice, costs):
                    self._try_pools(choice)
        return self._ordered()

    def attains(self, configuration: Configuration) -> bool:
        """Whether it meets the goal; evaluated once."""
        if configuration not in self.seen:
            self.seen[configuration] = self.evaluate(configuration)
        return self.seen[configuration].attainment >= self.goal

    def _ordered(self) -> list[Outcome]:
        return sorted(
            self.seen.values(), key=lambda o: (o.configuration.cost_per_hour, -o.attainment)
        )

    def _best_cost(self) -> float:
        """Of the cheapest that attains so far."""
        found = [o.configuration for o in self.seen.values() if o.attainment >= self.goal]
        return min((each.cost_per_hour for each in found), default=math.inf)

    def _most(self, choice: Configuration) -> int:
        """Instances that are allowed, and cost no more than the cheapest so far."""
        most = self.max_gpus // choice.tensor_parallel
        best = self._best_cost()
        return most if math.isinf(best) else min(most, int(best / choice.cost_per_hour + 1e-9))

    def _is_near(self, choice: Configuration, costs: dict[tuple[str, int], float]) -> bool:
        best = self._best_cost()
        return math.isinf(best) or costs[_place(choice)] <= _NEAR * best

    def _least(self, choice: Configuration, most: int) -> int | None:
        """The least number of instances up to `most` that attains; taken to be monotone."""
        if most < 1:
            return None
        low, high = 0, 1
        while not self.attains(choice.times(high)):
            if high == most:
                return None
            low, high = high, min(most, 2 * high)
        return self._between(low, high, lambda n: choice.times(n))

    def _fewer(self, most: int, times: Callable[[int], Configuration]) -> None:
        """The same from above: `most` is likely to miss, or to be the least."""
        if most < 1 or not self.attains(times(most)):
            return
        high, step = most, 1
        while high > step and self.attains(times(high - step)):
            high, step = high - step, 2 * step
        self._between(max(0, high - step), high, times)

    def _between(self, low: int, high: int, times: Callable[[int], Configuration]) -> int:
        """The least above `low` that attains, where `high` does."""
        while high - low > 1:
            middle = (low + high) // 2
            if self.attains(times(middle)):
                high = middle
            else:
                low = middle
        return high

    def _vary(self, name: str) -> None:
        """Every other value of one option, of the leading ones; routers not before one instance."""
        ordered = self._ordered()
        leading = [o for o in ordered if o.attainment >= self.goal] or sorted(
            ordered, key=lambda o: -o.attainment
        )
        options = dict.fromkeys(o.configuration.times(1) for o in leading)
        values = dict.fromkeys(getattr(choice, name) for choice in self.choices)
        for choice in list(options)[:_NUM_LEADING]:
            for value in values:
                other = replace(choice, **{name: value})
                least = 2 if name == "router" else 1
                if other != choice and other in self.choices and self._most(other) >= least:
                    self._fewer(self._most(other), other.times)

    def _try_pools(self, choice: Configuration) -> None:
        """The least prefill pool for TTFT, and the least decode pool behind it or one more."""
        share_of = self.evaluate.prefill_share
        pools = range(1, self._most(choice))
        least = next((n for n in pools if share_of(choice.times(1, n)) >= self.goal), None)
        if least is None:
            return
        for number in (least, least + 1):
            self._fewer(self._most(choice) - number, lambda n, p=number: choice.times(n, p))  # type: ignore[misc]


def _for_pools(options: Sequence[Configuration]) -> list[Configuration]:
    """Of each place and scheduler the one with the largest chunk: prompts are alone there."""
    found: dict[tuple[str, int, str], Configuration] = {}
    for choice in sorted(options, key=lambda choice: -choice.max_num_batched_tokens):
        found.setdefault((*_place(choice), choice.spec.kind), choice)
    return list(found.values())


def _place(choice: Configuration) -> tuple[str, int]:
    return choice.gpu, choice.tensor_parallel


def search(
    choices: Sequence[Configuration],
    evaluate: Evaluate,
    goal: float,
    max_gpus: int,
    *,
    has_pools: bool = False,
) -> list[Outcome]:
    """See `Search`."""
    return Search(choices, evaluate, goal, max_gpus, has_pools).run()


def rate_margin(evaluate_at: Callable[[float], Outcome], goal: float) -> float:
    """How many times the rate still attains, at most 2, to a sixteenth."""
    low, high = 1.0, 2.0
    if evaluate_at(high).attainment >= goal:
        return high
    while high - low > 1 / 16:
        middle = (low + high) / 2
        if evaluate_at(middle).attainment >= goal:
            low = middle
        else:
            high = middle
    return low
