"""Plain step times are those of the cost model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel
from sola_sched.cost.plain import PlainStepTimes

SECONDS = st.floats(0.0, 1e-2)


@given(
    st.tuples(*[SECONDS] * 7),
    st.lists(st.floats(0.0, 1e5), min_size=1, max_size=5),
    st.floats(0.0, 1e6),
)
def test_they_are_those_of_the_cost_model(
    values: tuple[float, ...], counts: list[float], ctx: float
) -> None:
    coefficients = Coefficients(*values, overlap=0.0)
    model, plain = CostModel.from_coefficients(coefficients), PlainStepTimes(coefficients)
    counted = np.array(counts)
    np.testing.assert_allclose(plain.prefill_s(counted), model.prefill_s(counted), rtol=1e-12)
    np.testing.assert_allclose(
        plain.decode_s(counted, ctx), model.decode_s(counted, ctx), rtol=1e-12
    )
    assert plain.prefill_s(counts[0]) == float(plain.prefill_s(counted)[0])
