"""Which decodes are judged lost, and how long a step the others bear."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from states import NOW, SLO, StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.planner.attain import AttainTuning, lost
from sola_sched.planner.attain.lost import Decodes

#: TPOT, seconds; tokens since the first; steps ahead of its schedule; wait for the first, seconds.
DECODES = st.lists(
    st.tuples(
        st.sampled_from([0.012, 0.05, 0.1]),
        st.integers(4, 200),
        st.sampled_from([-0.5, 0.5, 1.0, 1.5, 3.0]),
        st.sampled_from([0.5, 2.0]),
    ),
    min_size=1,
    max_size=12,
)


def decodes_of(builder: StateBuilder) -> Decodes:
    state = builder.build()
    return lost.judge_decodes(state, state.running, state.num_ahead, AttainTuning(), 1.0, 0)


@given(DECODES, st.sampled_from([1.0, 3.0, 500.0]))
def test_as_many_are_alive_as_bear_the_steps_of_all_of_them(decodes, left) -> None:
    b = StateBuilder(left=left)
    for place, (tpot_s, out, num_ahead, waited_s) in enumerate(decodes):
        first_ago_s = tpot_s * (out - num_ahead)
        b.decode(
            str(place),
            first_ago_s=first_ago_s,
            arrived_ago_s=first_ago_s + waited_s,
            out=out,
            slo=SloTarget(SLO.ttft_s, tpot_s),
        )
    judged, table, margin = decodes_of(b), b.table, AttainTuning().decode_margin

    rows = judged.rows
    due_s = table.first_token_s[rows] + table.tpot_s[rows] * (table.num_output[rows] + left - 1)
    bears_s = (due_s - NOW) / left  # the longest mean step that ends in time
    on_time = table.first_token_s[rows] <= table.due_s[rows]
    alive = ~judged.lost
    assert not (alive & ~on_time).any()
    assert judged.num_alive == alive.sum()
    if alive.any():
        assert judged.bear_s == np.float64(judged.sustain_s[alive].min())
        np.testing.assert_allclose(judged.bear_s, bears_s[alive].min(), rtol=1e-6, atol=1e-6)
        assert margin * judged.decode_s <= judged.bear_s + 1e-9
        least_s = np.minimum(judged.bank_s, judged.token_s)[alive].min()
        assert judged.slack_s >= min(least_s, judged.decode_s)
    given_up = on_time & judged.lost
    if given_up.any():  # with the best of them one more is a step too long for it
        step_s = judged.state.cost.decode_s(judged.num_alive + 1.0, judged.ctx_alive)
        assert bears_s[given_up].max() < margin * float(step_s) + 1e-6


def test_lengths_decide_whether_one_behind_its_schedule_is_lost() -> None:
    for left, is_lost in ((2.0, True), (500.0, False)):
        builder = StateBuilder(left=left)
        builder.decode("behind", first_ago_s=2.0, out=19)  # the 20th token was due at 1.9 s
        assert decodes_of(builder).lost.tolist() == [is_lost], left
