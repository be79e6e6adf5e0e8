"""Output tokens that are left of a request, by its prediction: `prediction.length`, compiled."""

from __future__ import annotations

from sola_sched.compiled.functions import compiled
from sola_sched.core.lengths import mean_left, overrun
from sola_sched.core.state import LIKELY
from sola_sched.prediction.length import NUM_LEVELS

NUM_LIKELY = len(LIKELY)


@compiled
def expected_left(request):
    """The mean, >= 1."""
    return _limited(request, mean_left(request.predicted, request.num_output))


@compiled
def likely_left(request, values):
    """Equally likely values, >= 1, into an array; see `remaining_at`."""
    quantiles, done, dead = request.predicted, float(request.num_output), 0
    while dead < NUM_LEVELS and quantiles[dead] <= done:
        dead += 1
    mass = 0.0  # that is outlived, in tenths
    if 0 < dead < NUM_LEVELS:
        below, above = quantiles[dead - 1], quantiles[dead]
        inside = (done - below) / max(above - below, 1e-9)
        mass = dead - 0.5 + min(max(inside, 0.0), 1.0)
    for i in range(NUM_LIKELY):
        if dead == NUM_LEVELS:
            left = 2.0 * LIKELY[i] * overrun(quantiles, request.num_output)
        else:
            place = mass + LIKELY[i] * (NUM_LEVELS - mass) - 0.5
            place = min(max(place, 0.0), NUM_LEVELS - 1.0)
            first = min(int(place), NUM_LEVELS - 2)
            share = place - first
            left = (1.0 - share) * quantiles[first] + share * quantiles[first + 1] - done
        values[i] = _limited(request, left)


@compiled
def _limited(request, left):
    return max(min(left, float(request.max_tokens - request.num_output)), 1.0)
