"""Compiled step times against those they are compiled from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.cost.model import Coefficients, CostModel
from sola_sched.errors import ConfigError
from sola_sched.simulator.cluster.fast import times
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import DecodeOnly, MeasuredStepTime, StepTimeModel

_COST = CostModel.from_coefficients(Coefficients(1e-9, 2e-9, 3e-5, 0.012, 4e-5, 5e-8, 0.01, 0.009))
#: Every form: a roofline with a kink and one without, curves that were measured, a fit.
STEP_TIMES: dict[str, Any] = {
    "linear": StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_ctx_s=1e-6, per_token_s=2e-5),
    "roofline": load_step_profile("llama-3-8b-a100").step_time,
    "tables": load_step_profile("llama-3-8b-a100-measured").step_time,
    "fitted": MeasuredStepTime(_COST),
}
STEP_TIMES |= {
    f"decodes by {name}": DecodeOnly(STEP_TIMES[name]) for name in ("linear", "roofline", "tables")
}

names = pytest.mark.parametrize("name", STEP_TIMES)
factors = st.sampled_from([1.0, 1.7])
counts = st.integers(0, 700)
contexts = st.integers(0, 400_000)


@names
@settings(max_examples=60, deadline=None)
@given(counts, contexts, st.integers(0, 9000), st.integers(0, 30_000), st.integers(1, 9), factors)
def test_steps_take_as_long(
    name: str, decodes: int, ctx: int, tokens: int, computed: int, chunks: int, factor: float
) -> None:
    batch_time = BatchTime(STEP_TIMES[name], factor)
    work = (
        decodes,
        ctx if decodes else 0,
        tokens,
        float(tokens * tokens),
        tokens * computed,
        chunks,
    )

    seconds = times.step_s(times.pack(batch_time), *work)

    assert seconds == pytest.approx(batch_time.step_s(*work), rel=1e-12)


@names
@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 700.0), contexts, st.integers(1, 700), st.floats(0.0, 9000.0), factors)
def test_so_do_decodes_and_prompts_alone(
    name: str, decodes: float, ctx: int, count: int, tokens: float, factor: float
) -> None:
    batch_time = BatchTime(STEP_TIMES[name], factor)
    packed = times.pack(batch_time)

    decode_s, prefill_s = times.decode_s(packed, decodes, ctx), times.prefill_s(packed, tokens)

    if decodes or name != "fitted":  # `CostModel.decode_s` has a step without decodes
        assert decode_s == pytest.approx(batch_time.decode_s(decodes, ctx), rel=1e-12)
    assert prefill_s == pytest.approx(batch_time.prefill_s(tokens), rel=1e-9)
    line = times.decode_line(packed, count)
    assert line == pytest.approx(batch_time.decode_line(count), rel=1e-12)


def test_a_step_time_of_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"StepTimeModel, StepTables, .*got function"):
        times.pack(BatchTime(lambda output, requests: 1.0))  # type: ignore[arg-type]
