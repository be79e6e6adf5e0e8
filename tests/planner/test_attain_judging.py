"""Who is judged lost, and how long a step may be: shortcuts against the whole calculation."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from states import SLO, StateBuilder

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
    return lost.judge_decodes(state, state.running, state.num_ahead, AttainTuning(), 0.95, 0)


@given(DECODES, st.sampled_from([1.0, 3.0, 500.0]))
def test_lengths_are_looked_up_only_where_they_decide(decodes, left) -> None:
    builder = StateBuilder(left=left)
    for place, (tpot_s, out, num_ahead, waited_s) in enumerate(decodes):
        first_ago_s = 0.95 * tpot_s * (out - num_ahead)
        builder.decode(
            str(place),
            first_ago_s=first_ago_s,
            arrived_ago_s=first_ago_s + waited_s,
            out=out,
            slo=SloTarget(SLO.ttft_s, tpot_s),
        )
    quick, whole = decodes_of(builder), decodes_of(builder)
    lost.judge_by_length(whole, AttainTuning(), 0)

    np.testing.assert_array_equal(quick.lost, whole.lost)
    assert quick.slack_s == whole.slack_s
    assert quick.decode_s == whole.decode_s
    bears_s = whole.sustain_s[whole.alive].min(initial=np.inf)
    assert quick.least_token_s <= bears_s * (1.0 + 1e-9)


def test_nobody_asks_for_lengths_while_all_are_ahead_of_their_schedules() -> None:
    builder = StateBuilder()
    builder.decode("ahead", first_ago_s=1.0, out=30)
    with patch.object(type(builder.lengths), "remaining") as remaining:
        decodes = decodes_of(builder)
    remaining.assert_not_called()
    assert not decodes.lost.any()


def test_lengths_decide_whether_one_behind_its_schedule_is_lost() -> None:
    for left, is_lost in ((2.0, True), (500.0, False)):
        builder = StateBuilder(left=left)
        builder.decode("behind", first_ago_s=2.0, out=19)  # the 20th token was due at 1.9 s
        assert decodes_of(builder).lost.tolist() == [is_lost], left
