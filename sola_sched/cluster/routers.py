"""Simple routers, each a rule of one sentence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from sola_sched.cluster.ties import Turns
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import (
    InstanceView,
    Refusal,
    RoutedRequest,
    Views,
    can_serve,
    candidates,
    refusal,
)

#: Up to so many instances all are looked at; of more this many times the base-2 logarithm.
_ALL, _PER_DOUBLING = 16, 4
#: Of idle instances, what differs by no more than this share, or times by these seconds, is equal.
_TIE, _TIE_S = 0.1, 1e-3


class CandidateRouter(ABC):
    """A router that picks among the instances that can serve the request at all."""

    def choose(self, request: RoutedRequest, views: Views, now_s: float) -> int | Refusal:
        """See `Router.choose`."""
        able = candidates(request, views)
        return self.pick(request, views, able, now_s) if able else refusal(request, views)

    @abstractmethod
    def pick(
        self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float
    ) -> int | Refusal:
        """One of the positions `able` (not empty), or why none."""

    def ended(self, req_id: str, instance: int) -> None:  # noqa: B027 - most rules keep no record
        """See `Router.ended`."""


class SampledRouter(CandidateRouter):
    """A router that looks at some of many instances, so that a decision costs their logarithm.

    They are drawn at random. If most of them cannot serve the request, it looks at all.

    Args:
        seed: Of the draws, as numpy takes it.
    """

    def __init__(self, seed: Sequence[int]) -> None:
        self._draws = np.random.default_rng(seed)

    def choose(self, request: RoutedRequest, views: Views, now_s: float) -> int | Refusal:
        """See `Router.choose`."""
        if len(views) > _ALL:
            number = math.ceil(_PER_DOUBLING * math.log2(len(views)))
            drawn = self._draws.integers(0, len(views), number).tolist()
            able = [i for i in drawn if i not in request.avoid and can_serve(views[i], request)]
            if 2 * len(able) >= number:
                return self.pick(request, views, able, now_s)
        return super().choose(request, views, now_s)


class RoundRobin(CandidateRouter):
    """Each instance in turn."""

    def __init__(self) -> None:
        self._turns = Turns()

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        return self._turns.next(able)


class WeightedRoundRobin(CandidateRouter):
    """Each instance in turn, in proportion to its weight and as evenly spread as can be.

    Every choice gives each instance its weight as credit; the one with the most is chosen and pays
    the sum of all.

    Args:
        weights: One for each instance, > 0; None for its number of GPUs.
    """

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        if weights is not None and not all(0.0 < weight < math.inf for weight in weights):
            raise ValueError(f"'weights' must be finite and > 0 (got {list(weights)}).")
        self._weights = weights
        self._credit: dict[int, float] = {}

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        weights = {i: self._weight(i, views[i]) for i in able}
        for i, weight in weights.items():
            self._credit[i] = self._credit.get(i, 0.0) + weight
        best = max(able, key=self._credit.__getitem__)
        self._credit[best] -= sum(weights.values())
        return best

    def _weight(self, instance: int, view: InstanceView) -> float:
        # One that joined after the weights were given.
        if self._weights is None or instance >= len(self._weights):
            return float(view.num_gpus)
        return self._weights[instance]


class SingleInstance(CandidateRouter):
    """All to one instance, the next one when it cannot serve."""

    def __init__(self, instance: int = 0) -> None:
        self._instance = instance

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        return next((i for i in able if i >= self._instance), able[0])


class JoinShortestQueue(CandidateRouter):
    """The instance with the fewest requests; of several, one at random.

    Args:
        seed: Of the choice among equals.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 17])

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        lengths = np.array([views[i].num_requests for i in able])
        return able[int(self._rng.choice(np.flatnonzero(lengths == lengths.min())))]


class PowerOfTwo(CandidateRouter):
    """Of two instances drawn at random, the one with fewer requests.

    Args:
        seed: Of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 18])

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        if len(able) == 1:
            return able[0]
        first, second = (able[int(i)] for i in self._rng.choice(len(able), 2, replace=False))
        return min(first, second, key=lambda i: views[i].num_requests)


class LeastPredictedTtft(SampledRouter):
    """The instance that is predicted to deliver the request's first token first.

    Of idle ones where it is later by no more than a tenth, each in turn.

    Args:
        seed: Of the instances that are looked at where there are many.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__([seed, 20])
        self._turns = Turns()

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        times_s = [predicted_ttft_s(views[i], request.prompt_tokens, now_s) for i in able]
        return self._turns.least(
            able, times_s, lambda i: views[i].num_requests, ratio=_TIE, slack=_TIE_S
        )


class MemoryBased(CandidateRouter):
    """The heterogeneous paper's Algorithm 2 with all requests taken for equal work.

    Source: Xiong et al., *High-Throughput LLM Inference on Heterogeneous Clusters*, section 4.1,
    Eq. 7 and 8 and Algorithm 2; "memory based" is its baseline with T = 1 (section 5.2). A request
    r on instance s is a load of

        w = T exp(theta kvusage(s))

    where kvusage is the KV that the unfinished requests sent there will take, prompt and predicted
    output, over what there is (it may exceed 1). The request goes where the largest load of all
    instances becomes smallest; its load is taken back when it ends. Departure: of instances that
    leave the largest load equal, the paper takes the first; here it is the one whose own load
    becomes smallest, and of those that are equal in this too each in turn.

    Args:
        theta: Weight of the memory, > 0; the paper's experiments use 2.
    """

    def __init__(self, theta: float = 2.0) -> None:
        if not 0.0 < theta < math.inf:
            raise ValueError(f"'theta' must be finite and > 0 (got {theta!r}).")
        self._theta = theta
        # Of instances that have requests: load and tokens of each, and their sums.
        self._placed: dict[int, dict[str, tuple[float, float]]] = {}
        self._loads: dict[int, float] = {}
        self._kv_tokens: dict[int, float] = {}
        self._turns = Turns()

    def work_s(self, request: RoutedRequest, view: InstanceView) -> float:
        """T of the request on the instance, in any unit that all instances share."""
        return 1.0

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        loads = [self._load(request, i, views[i]) for i in able]
        after = [self._loads.get(i, 0.0) + load for i, load in zip(able, loads, strict=True)]
        # The largest load of all is smallest where the own one is.
        best = self._turns.least(able, after, lambda i: views[i].num_requests, ratio=_TIE)
        placed = self._placed.setdefault(best, {})
        placed[request.req_id] = (loads[able.index(best)], request.peak_tokens)
        self._sum(best)
        return best

    def ended(self, req_id: str, instance: int) -> None:
        """See `Router.ended`."""
        placed = self._placed.get(instance, {})
        if placed.pop(req_id, None) is not None:
            self._sum(instance)

    def _sum(self, instance: int) -> None:
        # Anew, since a load may be so large that others are lost beside it.
        placed = self._placed[instance]
        if placed:
            self._loads[instance] = math.fsum(load for load, _ in placed.values())
            self._kv_tokens[instance] = math.fsum(tokens for _, tokens in placed.values())
        else:
            del self._placed[instance], self._loads[instance], self._kv_tokens[instance]

    def _load(self, request: RoutedRequest, instance: int, view: InstanceView) -> float:
        usage = self._kv_tokens.get(instance, 0.0) / view.kv_capacity_tokens
        # Limited only so that no queue, however long, overflows.
        return self.work_s(request, view) * math.exp(min(self._theta * usage, 500.0))


#: Name on the command line to a router made with a seed.
ROUTERS: dict[str, Callable[[int], CandidateRouter]] = {
    "round-robin": lambda seed: RoundRobin(),
    "weighted-round-robin": lambda seed: WeightedRoundRobin(),
    "single": lambda seed: SingleInstance(),
    "memory": lambda seed: MemoryBased(),
    "shortest-queue": JoinShortestQueue,
    "power-of-two": PowerOfTwo,
    "least-ttft": LeastPredictedTtft,
}
