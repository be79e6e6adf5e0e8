"""Step times against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel
from sola_sched.simulator.steps.time import (
    LLAMA_3_8B_A100,
    MeasuredStepTime,
    StepCounts,
    StepTimeModel,
)

ROOFLINE = StepTimeModel(
    base_s=1.0,
    per_decode_s=0.1,
    per_ctx_s=0.001,
    per_prefill_token_s=0.01,
    per_prefill_attn_s=1e-5,
    weights_s=5.0,
    per_token_s=0.05,
)


def make_step(*rows: tuple[int, int], prompt: int = 1000) -> tuple[Any, dict[str, Any]]:
    """A step of requests with (tokens computed before, tokens scheduled)."""
    output = SimpleNamespace(num_scheduled_tokens={str(i): n for i, (_, n) in enumerate(rows)})
    requests = {
        str(i): SimpleNamespace(
            num_computed_tokens=has + n, num_prompt_tokens=prompt, num_tokens=max(prompt, has + 1)
        )
        for i, (has, n) in enumerate(rows)
    }
    return output, requests


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        # No tokens, no time.
        ([], 0.0),
        # One decode: 1 base + 5 weights + 0.1 decode + 500 * 0.001 context.
        ([(500, 1)], 6.6),
        # 40 prompt tokens compute for 2 s while the weights are read for 5 s;
        # 40 * 0.01 all-reduce, 40 * (0 + 20) pairs.
        ([(0, 40)], 1.0 + 5.0 + 0.4 + 800e-5),
        # 200 compute for 10 s: the weights arrive meanwhile. Pairs 200 * (300 + 100).
        ([(300, 200)], 1.0 + 10.0 + 2.0 + 80_000e-5),
        # Mixed: 101 tokens compute for 5.05 s.
        ([(500, 1), (0, 100)], 1.0 + 5.05 + 0.1 + 0.5 + 1.0 + 5000e-5),
        # The last token of a prompt costs what a decode costs.
        ([(999, 1)], 1.0 + 5.0 + 0.1 + 0.999),
    ],
)
def test_roofline_step_takes_the_sum_worked_out_by_hand(
    rows: list[tuple[int, int]], seconds: float
) -> None:
    assert ROOFLINE(*make_step(*rows)) == pytest.approx(seconds, rel=1e-12)


def test_model_without_weight_terms_is_linear() -> None:
    rows = [(500, 1), (0, 100)]

    seconds = LLAMA_3_8B_A100(*make_step(*rows))

    assert seconds == pytest.approx(1e-2 + 3.8e-5 + 500 * 8.2e-8 + 100 * 9.36e-5 + 5000 * 3.06e-9)


def test_measured_model_takes_the_live_engines_word_for_prefill_and_decode() -> None:
    cost = CostModel.from_coefficients(
        Coefficients(a0=0.0, b0=0.0, c0=0.01, d0=1.0, a1=0.1, b1=0.001, c1=1.0, overlap=1.0)
    )
    step_time = MeasuredStepTime(cost)

    assert step_time(*make_step()) == 0.0
    # The decode of a prompt of 1000: its context includes the token it computes.
    assert step_time(*make_step((1000, 1))) == pytest.approx(1.0 + 0.1 + 1.001)
    # One token left of the prompt is a prefill to the profiler.
    assert step_time(*make_step((999, 1))) == pytest.approx(1.0 + 0.01)


@pytest.mark.parametrize(
    ("tokens", "products"), [(10, 5.02494), (100, 5 * 2**0.5), (1000, 50.2494)]
)
def test_smooth_roofline_exceeds_the_maximum_most_where_both_sides_are_equal(
    tokens: int, products: float
) -> None:
    smooth = replace(ROOFLINE, overlap_power=2.0)
    counts = StepCounts(num_prefills=1, prefill_tokens=tokens)

    excess = smooth.seconds(counts) - ROOFLINE.seconds(counts)

    assert excess == pytest.approx(products - max(5.0, 0.05 * tokens), rel=1e-3)
