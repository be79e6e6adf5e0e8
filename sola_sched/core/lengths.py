"""Output tokens that are left of one request, as `StepState.remaining`, compiled."""

from __future__ import annotations

import math

from sola_sched.compiled.functions import compiled
from sola_sched.prediction.length import NUM_LEVELS


@compiled
def expected_left(bin_of, line, trusts_predictions, request, num_ahead):
    """Expected output tokens left of a request after those in flight, >= 1.

    Args:
        bin_of, line: As in `LengthLines`.
        trusts_predictions: Whether its own prediction counts, where it has one.
        request: Its record.
        num_ahead: Tokens in flight.
    """
    done = request.num_output + num_ahead
    most = float(request.max_tokens - done)
    cell = bin_of[min(done + 1, len(bin_of) - 1)]
    left = line[1, request.length_class, cell] * done + line[0, request.length_class, cell]
    left = max(min(left, most), 1.0)
    if trusts_predictions and request.predicted[0] > 0.0:  # NaN: none
        left = max(min(_blended(request.predicted, done, left), most), 1.0)
    return left


@compiled
def mean_left(quantiles, done):
    """By a prediction alone, before limits are applied; see `remaining_mean`."""
    num_alive, mass = 0, 0.0
    for level in range(NUM_LEVELS):
        if quantiles[level] > done:
            num_alive += 1
            mass += quantiles[level]
    return mass / num_alive - done if num_alive else overrun(quantiles, done)


@compiled
def overrun(quantiles, done):
    """Of a request that has outlived its prediction, which doubles then."""
    largest = quantiles[NUM_LEVELS - 1]
    doublings = math.floor(math.log2(done / largest)) + 1.0
    return largest * 2.0**doublings - done


@compiled
def _blended(quantiles, done, otherwise):
    """As `mean_left`; a prediction that is outlived loses weight to another expectation."""
    left, largest = mean_left(quantiles, done), quantiles[NUM_LEVELS - 1]
    if largest > done:
        return left
    weight = largest / done
    return weight * left + (1.0 - weight) * otherwise
