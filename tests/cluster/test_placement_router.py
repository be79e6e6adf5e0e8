"""The packing router on views: what it reads, follows and does when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cluster_views import make_routed, make_view
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import make_model

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.placement import Phase
from sola_sched.cluster.placement.router import PackingRouter, SpreadingRouter, performance_of
from sola_sched.cluster.reports import Reports
from sola_sched.cluster.view import InstanceView, Refusal
from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel


def _view(**changes: object) -> InstanceView:
    return make_view(**({"model": make_model(capacity=1e6)} | changes))  # type: ignore[arg-type]


def test_requests_are_packed_until_a_target_would_be_missed() -> None:
    # TPOT 12 ms at gamma 1/2, theta 0.9: 0.9 (2e-3 - b 1e-4) / 1e-6 tokens, b (200 + 50) needed.
    router, reports = PackingRouter(), Reports()
    for _ in range(3):
        reports.join(_view(), 0.0)
    chosen = []
    for k in range(12):
        request = make_routed(f"r{k}", prompt_tokens=200, ttft_s=10.0, tpot_s=0.012)
        where = router.choose(request, reports.views, 0.0)
        assert isinstance(where, int)
        reports.sent(where, request, 0.0)
        chosen.append(where)

    assert chosen == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_the_tightest_target_is_forgotten_when_its_request_ends() -> None:
    router = PackingRouter()
    busy = _view(running=[3000.0], running_bank_s=np.array([5.0]))
    router.choose(make_routed("tight", prompt_tokens=10, tpot_s=0.012), [_view()], 0.0)
    loose = make_routed("loose", prompt_tokens=10, tpot_s=0.1)
    two = [busy, _view()]

    during = router.choose(loose, two, 0.0)
    router.ended("loose", 1)
    router.ended("tight", 0)
    after = router.choose(loose, [replace(busy, reported_s=0.1), two[1]], 0.1)

    assert (during, after) == (1, 0)


def test_an_instance_without_bank_gets_no_prompt() -> None:
    running = {"running": [100.0], "running_bank_s": np.array([0.0])}

    chosen = PackingRouter().choose(make_routed(), [_view(**running), _view()], 0.0)

    assert chosen == 1


def test_lost_requests_hold_no_bank() -> None:
    running = {
        "running": [100.0],
        "running_bank_s": np.array([-3.0]),
        "running_lost": np.array([1.0]),
    }

    assert PackingRouter().choose(make_routed(), [_view(**running), _view()], 0.0) == 0


def test_what_is_lost_leaves_its_place_to_others_where_the_engine_does_so() -> None:
    # 9000 late prompt tokens wait on the first, 3000 in time on the second.
    late = _view(waiting=[9000.0], num_waiting_lost=1)
    in_time = _view(waiting=[3000.0])
    request = make_routed(prompt_tokens=500)

    assert SpreadingRouter().choose(request, [late, in_time], 0.0) == 0
    assert SpreadingRouter(skips_lost=False).choose(request, [late, in_time], 0.0) == 1


def test_time_that_passes_without_a_report_counts_as_work_done() -> None:
    # Reported together; 4000 tokens take 0.4 s, what was sent since has not begun.
    waiting = _view(waiting=[4000.0], reported_s=0.0)
    sent_since = _view(waiting=[2000.0], reported_s=0.0, num_unreported=1)
    router = SpreadingRouter()

    at_once = router.choose(make_routed("a", prompt_tokens=500), [waiting, sent_since], 0.0)
    later = router.choose(
        make_routed("b", prompt_tokens=500, arrival_s=0.35), [waiting, sent_since], 0.35
    )

    assert (at_once, later) == (1, 0)


def test_prompts_reported_long_ago_have_been_computed_since() -> None:
    router = PackingRouter()
    waiting = _view(waiting=[6000.0], reported_s=0.0)
    request = make_routed(prompt_tokens=5000, arrival_s=0.5, ttft_s=0.7, tpot_s=1.0)

    # 6000 + 5000 tokens take 1.1 s; after 0.5 s half a second of it is done.
    assert router.choose(request, [waiting, _view()], 0.5) == 0
    fresh = replace(waiting, reported_s=0.5)
    assert PackingRouter().choose(request, [fresh, _view()], 0.5) == 1


def test_where_nothing_fits_the_least_broken_instance_is_taken() -> None:
    slow = _view(waiting=[9000.0])
    slower = _view(waiting=[20_000.0])

    chosen = PackingRouter().choose(make_routed(prompt_tokens=100, ttft_s=0.1), [slower, slow], 0.0)

    assert chosen == 1


def test_dead_avoided_and_too_small_instances_are_left_out() -> None:
    views = [_view(is_alive=False), _view(max_model_len=50), _view(), _view()]
    router = PackingRouter()

    assert router.choose(make_routed(avoid=[2]), views, 0.0) == 3
    assert router.choose(make_routed(avoid=[2, 3]), views, 0.0) == 2
    assert isinstance(router.choose(make_routed(), views[:2], 0.0), Refusal)
    assert isinstance(router.choose(make_routed(), [], 0.0), Refusal)


def test_an_instance_that_joins_is_used() -> None:
    router = PackingRouter()
    full = _view(max_num_seqs=1, running=[50.0], running_bank_s=np.array([9.0]))
    assert router.choose(make_routed("a"), [full], 0.0) == 0

    assert router.choose(make_routed("b"), [full, _view()], 0.0) == 1


def test_a_cost_model_is_taken_for_the_lines_through_it() -> None:
    coefficients = Coefficients(0.0, 0.0, 1e-4, 0.02, 3e-5, 2e-7, 0.01, 0.005)
    view = make_view(model=CostModel.from_coefficients(coefficients))

    model = performance_of(view)

    assert model.prefill.per_token_s == pytest.approx(1e-4)
    assert model.prefill.base_s == pytest.approx(0.02)
    assert model.decode.per_request_s == pytest.approx(3e-5)
    assert model.decode.per_ctx_s == pytest.approx(2e-7)
    assert model.decode.base_s == pytest.approx(0.01)
    assert model.kv_capacity_bytes == view.kv_capacity_tokens


def test_spreading_takes_the_instance_with_the_most_room_for_its_kind() -> None:
    # The same prompts wait on both; the second computes them twice as fast.
    slow = _view(waiting=[1000.0])
    fast = _view(
        waiting=[1000.0], model=make_model(capacity=1e6, per_token_s=5e-5, prefill_base_s=0.005)
    )
    request = make_routed(prompt_tokens=500)

    assert SpreadingRouter().choose(request, [slow, fast], 0.0) == 1
    # Packing takes the one that has less room left, as long as the targets hold.
    assert PackingRouter(is_relative=True).choose(request, [slow, fast], 0.0) == 0


def test_spreading_minds_the_memory_where_that_is_nearest_to_its_limit() -> None:
    full = _view(running=[90_000.0], kv_used_tokens=90_000, running_bank_s=np.array([9.0]))
    waiting = _view(waiting=[3000.0])
    request = make_routed(prompt_tokens=500)

    assert SpreadingRouter().choose(request, [full, waiting], 0.0) == 1


def test_a_decode_pool_ignores_the_first_token() -> None:
    request = make_routed(ttft_s=1e-6, tpot_s=0.05)
    busy = _view(running=[3000.0], running_bank_s=np.array([0.0]))

    assert PackingRouter(phase=Phase.DECODE).choose(request, [busy, _view()], 0.0) == 0
    assert PackingRouter().choose(request, [busy, _view()], 0.0) == 1


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["aladdin", "packing", "spreading", "workload"]),
    st.lists(
        st.tuples(st.lists(st.integers(1, 2000), max_size=6), st.lists(st.integers(1, 2000))),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 8000),
    st.floats(0.01, 5.0),
    st.floats(0.005, 0.2),
)
def test_any_cluster_that_can_serve_gets_an_answer(
    name: str,
    loads: list[tuple[list[int], list[int]]],
    prompt: int,
    ttft_s: float,
    tpot_s: float,
) -> None:
    views = [_view(waiting=waiting, running=running) for waiting, running in loads]
    request = make_routed(prompt_tokens=prompt, ttft_s=ttft_s, tpot_s=tpot_s)

    chosen = ALL_ROUTERS[name](0).choose(request, views, 0.0)

    assert isinstance(chosen, int)
    assert 0 <= chosen < len(views)
