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

    p(new) + h * sum over decodes not lost of [p(x with the new one) - p(x without)] - d * wait

is largest, `wait` being its predicted share of the TTFT target. It attains and hurts the fewest
there. h < 1: many of those that it would put behind are put behind by a later prompt anyway. d: a
request that waits long leaves less time to those that come after it. If it can attain nowhere it
goes where few are left to be hurt, so an overload that lasts stays on few instances, and the
others keep their targets, while a short one is spread. An engine that serves lost requests last
also lets prompts wait while its decodes need the time: there half of `prompts` is taken from them.

Of many instances some are looked at, see `SampledRouter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.routers import SampledRouter
from sola_sched.cluster.ties import Turns
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import InstanceView, RoutedRequest, Views

FloatArray = NDArray[np.float64]

#: w for TTFT, and for TPOT, whose predictions reach farther ahead.
_TTFT_WIDTH, _TPOT_WIDTH = 0.1, 0.05
#: h and d, found by trial (docs/decisions/combined-placement.md).
_HARM, _DELAY = 0.25, 1.0
#: Share of the time of prompts by which decodes are put off: of an engine that lets prompts wait
#: for them, found by trial likewise, and of any other.
_TAKEN_IF_HELD, _TAKEN = 0.5, 1.0
#: Of idle instances, those where so many requests fewer attain are as good.
_GAIN_TIE = 0.02
_LEAST_S = 1e-6
_FARTHEST = 50.0


class CombinedRouter(SampledRouter):
    """See the module.

    Args:
        seed: Of the instances that are looked at where there are many.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__([seed, 19])
        self._turns = Turns()

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        """See `CandidateRouter.pick`."""
        losses = [-expected_gain(views[i], request, now_s) for i in able]
        return self._turns.least(able, losses, lambda i: views[i].num_requests, slack=_GAIN_TIE)


def expected_gain(view: InstanceView, request: RoutedRequest, now_s: float) -> float:
    """Requests that are expected to attain more if the instance gets this one; may be negative."""
    slo, output, model = request.slo, request.length.mean, view.model
    left_s = max(_LEAST_S, request.arrival_s + slo.ttft_s - now_s)
    first_s = predicted_ttft_s(view, request.prompt_tokens, now_s)
    num, with_new = view.num_requests, view.held_tokens + request.prompt_tokens
    own_s = float(model.decode_s(num + 1, with_new + 0.5 * output))
    gain = _chance(first_s / left_s, _TTFT_WIDTH)
    if math.isfinite(slo.tpot_s):
        gain *= _chance(own_s / slo.tpot_s, _TPOT_WIDTH)
    gain -= _DELAY * first_s / left_s
    tpot_s = slo.tpot_s
    decodes = view.kept(("decodes", tpot_s), lambda: _decodes_of(view, tpot_s))
    if decodes is None:
        return gain
    new_s = _taken(view) * float(model.prefill_s(request.prompt_tokens))
    step_s = float(model.decode_s(num + 1, with_new))
    after_s = decodes.left * step_s + (decodes.prompts_s + new_s)
    change = float(_chances(after_s / decodes.due_s).sum()) - decodes.num_attain
    return gain + _HARM * change


class _Decodes(NamedTuple):
    """The decodes of an instance that can attain, before a new request.

    Attributes:
        left: Tokens that each has left [d].
        due_s: Bank and target: time until its last token is due [d].
        prompts_s: Time that the prompts to come take from them.
        num_attain: How many are expected to attain.
    """

    left: FloatArray
    due_s: FloatArray
    prompts_s: float
    num_attain: float


def _decodes_of(view: InstanceView, tpot_s: float) -> _Decodes | None:
    alive = (view.running_lost == 0.0) & (view.running_prefill == 0.0)
    alive &= np.isfinite(view.running_bank_s)
    if not alive.any():
        return None
    left = view.running_left[alive]
    due_s = np.maximum(view.running_bank_s[alive] + left * tpot_s, _LEAST_S)
    tokens = float(view.running_prefill.sum() + view.waiting_ahead.sum())
    prompts_s = _taken(view) * float(view.model.prefill_s(tokens)) if tokens else 0.0
    step_s = float(view.model.decode_s(max(1, view.num_requests), view.held_tokens))
    num_attain = float(_chances((left * step_s + prompts_s) / due_s).sum())
    return _Decodes(left, due_s, prompts_s, num_attain)


def _taken(view: InstanceView) -> float:
    return _TAKEN_IF_HELD if view.serves_lost_last else _TAKEN


def _chance(x: float, width: float) -> float:
    return 1.0 / (1.0 + math.exp(min((x - 1.0) / width, _FARTHEST)))


def _chances(x: FloatArray) -> FloatArray:
    chances: FloatArray = 1.0 / (1.0 + np.exp(np.minimum((x - 1.0) / _TPOT_WIDTH, _FARTHEST)))
    return chances
