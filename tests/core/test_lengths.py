"""Lengths that compiled code finds are those that `StepState.remaining` finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from states import StateBuilder

from sola_sched.core.lengths import expected_left
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.prediction.length import NUM_LEVELS, LengthPrediction

_REQUEST = st.tuples(
    st.integers(1, 5000),  # prompt
    st.integers(1, 9000),  # most output tokens
    st.integers(1, 9000),  # those so far
    st.integers(0, 3),  # in flight
    st.none() | st.lists(st.integers(1, 3000), min_size=NUM_LEVELS, max_size=NUM_LEVELS),
)


@settings(max_examples=60)
@given(
    st.lists(_REQUEST, min_size=1, max_size=8),
    st.lists(st.integers(1, 4000), max_size=30),
    st.booleans(),
)
def test_lengths_are_as_those_of_the_state(
    requests: list[tuple[int, int, int, int, list[int] | None]], ended: list[int], trusts: bool
) -> None:
    histogram, b = LengthHistogram(), StateBuilder()
    for place, (prompt, most, output, ahead, quantiles) in enumerate(requests):
        row = b.decode(f"r{place}", first_ago_s=1.0, out=output, prompt=prompt)
        b.table.max_tokens[row] = most
        b.table.num_in_flight[row] = ahead
        b.table.length_class[row] = histogram.class_of(prompt, most)
        if quantiles is not None:
            prediction = LengthPrediction(np.sort(quantiles).astype(float), "neighbours")
            b.table.predict(row, prediction)
    for place, length in enumerate(ended):
        histogram.observe(place % histogram.num_classes, length)
    state = b.build(lengths=histogram, trusts_predictions=trusts)

    left = [
        expected_left(*histogram.lines(), trusts, b.table.records[row], ahead)
        for row, ahead in zip(state.running, state.num_ahead, strict=True)
    ]

    np.testing.assert_allclose(left, state.remaining(state.running, state.num_ahead), rtol=1e-12)
