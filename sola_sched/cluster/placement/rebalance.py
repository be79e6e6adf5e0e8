"""Aladdin's Algorithm 2: new requests move from instances that got more than was predicted.

Source: Aladdin, section 4.3. For each instance l_e sums the errors of the outputs predicted and b_e
those of the number of requests: a request that outlives its prediction adds its new prediction l'
and 1, one that ends early takes off what was not generated and 1. l' is the mean output, in all, of
requests that outlive the same prediction: the plan had the request gone, so all of it counts, as
all of a new request does that moves. By Eq. 4 both are worth time, so

    alpha l_e + beta b_e + c = 0 with alpha = k2, beta = c2,

and |c| / sqrt(alpha^2 + beta^2) is how far the instance is from its plan. Requests that were placed
but have not started move as long as the sum over the instances falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.performance.model import DecodeTime
from sola_sched.cluster.placement.demand import Demand

FloatArray = NDArray[np.float64]
_LEAST_GAIN = 1e-12  # relative; below it a move is rounding


@dataclass(frozen=True, slots=True)
class InstanceError:
    """What an instance has beside its plan.

    Attributes:
        tokens: l_e; negative where requests ended early.
        requests: b_e.
    """

    tokens: float = 0.0
    requests: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How a request compares with what was predicted when it was placed.

    Attributes:
        predicted: Output tokens predicted at placement.
        generated: Output tokens so far.
        is_finished: True once it has ended; `generated` is its true length then.
        predicted_again: For one that outlives its prediction, l': the output tokens, from the first
            on, that such requests generate in the mean. More than `predicted` and `generated`.
    """

    predicted: float
    generated: float
    is_finished: bool = False
    predicted_again: float = 0.0


def error_of(requests: Iterable[Progress]) -> InstanceError:
    """Lines 4 to 13 of the algorithm, for the requests of one instance."""
    tokens, count = 0.0, 0.0
    for request in requests:
        if request.is_finished:
            if request.generated < request.predicted:
                tokens += request.generated - request.predicted
                count -= 1.0
        elif request.generated > request.predicted:
            tokens += request.predicted_again
            count += 1.0
    return InstanceError(tokens, count)


def rebalance(
    decode: Sequence[DecodeTime],
    errors: Sequence[InstanceError],
    placed: Sequence[int],
    demands: Sequence[Demand],
    may_move: Callable[[int, int], bool] | None = None,
) -> list[int]:
    """Lines 14 to 23: the instances of the new requests after moving.

    The paper minimizes over all moves; here the best single move is taken until none helps, which
    is the same where one move is enough and costs requests times instances for each move.

    Args:
        decode: Eq. 3 of each instance.
        errors: Of each instance.
        placed: Where each new request was placed.
        demands: The new requests.
        may_move: Whether request j may go to instance i; a check of the constraints.

    Returns:
        The instance of each new request.
    """
    alpha = np.array([d.per_ctx_s for d in decode])
    beta = np.array([d.per_request_s for d in decode])
    scale = np.maximum(np.hypot(alpha, beta), 1e-300)
    alpha, beta = alpha / scale, beta / scale
    offsets = alpha * [e.tokens for e in errors] + beta * [e.requests for e in errors]
    where = list(placed)
    refused: set[tuple[int, int]] = set()
    while True:
        move = _best_move(offsets, alpha, beta, where, demands, refused)
        if move is None:
            return where
        j, target = move
        if may_move is not None and not may_move(j, target):
            refused.add(move)
            continue
        source, tokens = where[j], demands[j].output_tokens
        offsets[source] -= alpha[source] * tokens + beta[source]
        offsets[target] += alpha[target] * tokens + beta[target]
        where[j] = target


def _best_move(
    offsets: FloatArray,
    alpha: FloatArray,
    beta: FloatArray,
    where: Sequence[int],
    demands: Sequence[Demand],
    refused: set[tuple[int, int]],
) -> tuple[int, int] | None:
    """The move of one request that lowers the sum of |offsets| the most."""
    best, best_change = None, -_LEAST_GAIN * max(1.0, float(np.abs(offsets).sum()))
    for j, source in enumerate(where):
        weight = alpha * demands[j].output_tokens + beta
        left = abs(offsets[source] - weight[source]) - abs(offsets[source])
        change = left + np.abs(offsets + weight) - np.abs(offsets)
        change[source] = np.inf
        change[[i for k, i in refused if k == j]] = np.inf
        target = int(change.argmin())
        if change[target] < best_change:
            best, best_change = (j, target), float(change[target])
    return best
