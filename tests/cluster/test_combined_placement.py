"""The combined placement: a request goes where it attains and hurts the fewest."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_views import LinearSteps, make_routed, make_view

from sola_sched.cluster.placement.expected import CombinedRouter, expected_gain
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import InstanceView, Refusal


def test_an_empty_instance_is_worth_one_request_less_its_wait() -> None:
    request = make_routed(ttft_s=1.0)
    wait = predicted_ttft_s(make_view(), request.prompt_tokens, 0.0)

    assert expected_gain(make_view(), request, 0.0) == pytest.approx(1.0 - wait, abs=0.01)


def test_where_prompts_leave_no_time_for_the_first_token_nothing_is_gained() -> None:
    view = make_view(waiting=[20_000.0])

    assert expected_gain(view, make_routed(ttft_s=1.0), 0.0) < 0.01


def test_decodes_that_would_miss_their_target_count_against_the_instance() -> None:
    """Steps of 10 ms + 1 ms a decode against 30 ms: 20 decodes have room, the 21st takes it."""
    model = LinearSteps(step_s=0.01, per_decode_s=0.001)
    view = make_view(running=[100.0] * 20, left=50.0, model=model)

    assert expected_gain(view, make_routed(tpot_s=0.030), 0.0) < -0.5


def test_lost_decodes_cannot_be_hurt() -> None:
    model = LinearSteps(step_s=0.01, per_decode_s=0.001)
    view = make_view(running=[100.0] * 20, left=50.0, model=model, running_lost=np.ones(20))

    assert expected_gain(view, make_routed(tpot_s=0.030), 0.0) >= 0.0


def test_prompts_do_less_harm_where_they_wait_for_decodes() -> None:
    """0.3 s of prompt before decodes with 0.2 s to spare: late in vLLM's order, not in ours."""
    model = LinearSteps(step_s=0.01, per_prompt_token_s=1e-4)
    request = make_routed(prompt_tokens=3_000, ttft_s=10.0, tpot_s=0.030)
    shared = {"running": [100.0] * 20, "left": 10.0, "model": model}
    first_come, held = (
        expected_gain(make_view(**shared, serves_lost_last=ours), request, 0.0)  # type: ignore[arg-type]
        for ours in (False, True)
    )

    assert first_come < -3.0
    assert held > 0.5


def test_of_instances_that_attain_the_one_with_the_shorter_wait_is_taken() -> None:
    waiting, idle = make_view(waiting=[1000.0]), make_view()

    assert CombinedRouter().choose(make_routed(ttft_s=10.0), [waiting, idle], 0.0) == 1


def test_an_overload_stays_where_all_are_lost_already() -> None:
    """No instance has time; of the two, one has nobody on course."""
    model = LinearSteps(step_s=0.01, per_decode_s=0.001)
    shared = {"running": [100.0] * 25, "left": 50.0, "model": model, "waiting": [20_000.0]}
    on_course = make_view(**shared)  # type: ignore[arg-type]
    lost = make_view(**shared, running_lost=np.ones(25))  # type: ignore[arg-type]

    assert CombinedRouter().choose(make_routed(tpot_s=0.036), [on_course, lost], 0.0) == 1


def test_with_room_everywhere_the_faster_gpu_is_taken() -> None:
    slow = make_view(model=LinearSteps(per_prompt_token_s=8e-4, step_s=0.05))
    fast = make_view(model=LinearSteps(per_prompt_token_s=1e-4, step_s=0.01))

    assert CombinedRouter().choose(make_routed(prompt_tokens=800), [slow, fast], 0.0) == 1


def test_of_many_instances_only_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def gain(view: InstanceView, request: object, now_s: float) -> float:
        looked_at.append(view)
        return 0.0

    monkeypatch.setattr("sola_sched.cluster.placement.expected.expected_gain", gain)

    CombinedRouter().choose(make_routed(), [make_view()] * 1000, 0.0)

    assert len(looked_at) == 40  # 4 x log2


def test_the_dead_are_found_out_among_many() -> None:
    dead = make_view(is_alive=False)
    views = [dead] * 999 + [make_view()]

    assert CombinedRouter().choose(make_routed(), views, 0.0) == 999
    assert isinstance(CombinedRouter().choose(make_routed(), [dead] * 1000, 0.0), Refusal)
