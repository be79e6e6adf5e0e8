"""Plans are the same whether compiled code finds the lengths of outputs, or Python does."""

from __future__ import annotations

import numpy as np
import pytest
from random_states import random_builder
from states import as_lists, make_attain

from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.prediction.length import (
    NO_LINES,
    NUM_LEVELS,
    LengthLines,
    LengthPrediction,
)


class WithoutLines(LengthHistogram):
    def lines(self) -> LengthLines:
        return NO_LINES


@pytest.mark.parametrize("seed", range(30))
def test_plans_are_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = LengthHistogram(), WithoutLines()
    planners = [make_attain(overload=("defer", "reject")[seed % 2]) for _ in models]
    num_plans = 0
    for _ in range(4):
        b = random_builder(rng, 1 + seed % 3)
        for row in [*b.running, *b.table.row_of.values()]:
            if rng.random() < 0.4:
                quantiles = np.sort(rng.integers(1, 400, NUM_LEVELS)).astype(float)
                b.table.predict(row, LengthPrediction(quantiles, "neighbours"))
        for row in b.running:
            b.table.num_in_flight[row] = rng.integers(0, 3)
        for row in b.table.row_of.values():
            prompt, most = int(b.table.num_prompt[row]), int(b.table.max_tokens[row])
            classes = [model.class_of(prompt, most) for model in models]
            assert classes[0] == classes[1]
            b.table.length_class[row] = classes[0]
        for length in rng.integers(1, 600, 40):
            for model in models:
                model.observe(int(length) % model.num_classes, int(length))
        trusts = bool(rng.random() < 0.7)
        plans = [
            as_lists(planner.plan(b.build(lengths=model, trusts_predictions=trusts)))
            for planner, model in zip(planners, models, strict=True)
        ]
        assert plans[0] == plans[1]
        num_plans += plans[0][-1] is not None
    assert num_plans
