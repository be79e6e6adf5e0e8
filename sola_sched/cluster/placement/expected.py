"""The combined placement: the instance on which the most requests are expected to attain.

Aladdin's constraints (section 4.2) with each instance's own model, as the heterogeneous paper has
one for each, but soft, and asked of every request that an instance has. What a request takes of
what its target allows is

    x = (left * step + prompts) / (bank + left * TPOT)      of a decode            (b, d)
    x = predicted time to its first token / TTFT            of the new one         (c, e, slots)
    x = step at the middle of its output / TPOT             likewise               (b)

where `step` is a decode step with the new request, `prompts` the time that the prompts to come
take from the decodes, and the predicted time to the first token waits for slots and for KV memory
as the expected ends leave them. The chance to attain is p(x) = 1 / (1 + exp((x - 1) / w)).
A request goes where

    p(new) + sum over decodes not lost of [p(x with the new one) - p(x without)]

is largest: where it attains and hurts the fewest. If it can attain nowhere it goes where nobody is
left to be hurt, so an overload stays on few instances, and the others keep their targets. With
room everywhere the differences of p are small, and it goes where the tightest limit is the
farthest.

Of many instances so many are looked at as the logarithm of their number says, drawn at random, so
that a decision costs no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.routers import CandidateRouter
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import InstanceView, Refusal, RoutedRequest, Views

FloatArray = NDArray[np.float64]

#: w for TTFT, and for TPOT, whose predictions reach farther ahead.
_TTFT_WIDTH, _TPOT_WIDTH = 0.1, 0.05
#: Up to so many instances all are looked at; of more this many times the base-2 logarithm.
_ALL, _PER_DOUBLING = 16, 4
_LEAST_S = 1e-6
_FARTHEST = 50.0


class CombinedRouter(CandidateRouter):
    """See the module.

    Args:
        seed: Of the instances that are looked at where there are many.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 19])

    def choose(self, request: RoutedRequest, views: Views, now_s: float) -> int | Refusal:
        """See `Router.choose`."""
        if len(views) > _ALL:
            number = math.ceil(_PER_DOUBLING * math.log2(len(views)))
            drawn = self._rng.integers(0, len(views), number).tolist()
            able = [i for i in drawn if i not in request.avoid and _can(views[i], request)]
            if able:
                return self.pick(request, views, able, now_s)
        return super().choose(request, views, now_s)

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        return max(able, key=lambda i: expected_gain(views[i], request, now_s))


def expected_gain(view: InstanceView, request: RoutedRequest, now_s: float) -> float:
    """Requests that are expected to attain more if the instance gets this one; may be negative."""
    slo, output = request.slo, request.length.mean
    left_s = max(_LEAST_S, request.arrival_s + slo.ttft_s - now_s)
    first_s = predicted_ttft_s(view, request.prompt_tokens, now_s)
    num, ctx = view.num_requests, view.held_tokens
    with_new = ctx + request.prompt_tokens
    own_s = float(view.model.decode_s(num + 1, with_new + 0.5 * output))
    gain = _chance(first_s / left_s, _TTFT_WIDTH)
    if math.isfinite(slo.tpot_s):
        gain *= _chance(own_s / slo.tpot_s, _TPOT_WIDTH)
    alive = (view.running_lost == 0.0) & (view.running_prefill == 0.0)
    alive &= np.isfinite(view.running_bank_s)
    if not alive.any():
        return gain
    left = view.running_left[alive]
    # Bank and target: time until its last token is due.
    due_s = np.maximum(view.running_bank_s[alive] + left * request.slo.tpot_s, _LEAST_S)
    prompts_s = _prompts_s(view)
    new_s = float(view.model.prefill_s(request.prompt_tokens))
    before_s = left * float(view.model.decode_s(max(1, num), ctx)) + prompts_s
    after_s = left * float(view.model.decode_s(num + 1, with_new)) + prompts_s + new_s
    change = _chances(after_s / due_s) - _chances(before_s / due_s)
    return gain + float(change.sum())


def _prompts_s(view: InstanceView) -> float:
    tokens = float(view.running_prefill.sum() + view.waiting_tokens.sum())
    return float(view.model.prefill_s(tokens)) if tokens else 0.0


def _can(view: InstanceView, request: RoutedRequest) -> bool:
    return view.is_alive and view.fits(request.prompt_tokens + 1)


def _chance(x: float, width: float) -> float:
    return 1.0 / (1.0 + math.exp(min((x - 1.0) / width, _FARTHEST)))


def _chances(x: FloatArray) -> FloatArray:
    chances: FloatArray = 1.0 / (1.0 + np.exp(np.minimum((x - 1.0) / _TPOT_WIDTH, _FARTHEST)))
    return chances
