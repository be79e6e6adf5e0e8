"""Wrong step times and lengths do not make an engine refuse all that comes, for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, step_until, warm_up

import sola_sched
from sola_sched.cost.file import Coefficients
from sola_sched.cost.fit import StepShape
from sola_sched.cost.model import CostModel
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

_KINDS = (
    StepShape(0, 0, 300, 9e4, 0.0),
    StepShape(8, 800, 0, 0.0, 0.0),
    StepShape(8, 800, 300, 9e4, 0.0),
)
#: What makes a request one whose answer has to end in time.
_JOB = {"slo_class": "job"}
#: A prompt token takes 0.1 ms. By this profile one of 1,450 takes 2.3 s, one of 40 what it does.
_STEEP = Coefficients(1e-6, 1e-6, 1e-4, 0.01, 2e-4, 1e-9, 0.01, 0.01)
#: And by this one eight times what it does; decodes are right.
_DEAR = Coefficients(0.0, 0.0, 8e-4, 0.01, 2e-4, 1e-9, 0.01, 0.01)


def small_engine(*, is_async: bool = False, **options: object) -> VirtualEngine:
    sola = {"ttft_s": 1.0, "tpot_s": 0.05, "overload": "reject", **options}
    return make_small_engine(sola_sched.Scheduler, sola, async_scheduling=is_async)


def with_jobs(e2e_s: float) -> VirtualEngine:
    """An engine that has learned its step times and has such a class."""
    engine = small_engine(is_async=True, classes={"job": {"e2e_s": e2e_s}})
    warm_up(engine)
    step_until(engine, lambda: False)
    return engine


def with_profile(coefficients: Coefficients, folder: Path) -> VirtualEngine:
    path = folder / "profile.json"
    CostModel.from_coefficients(coefficients).save(path, meta={})
    return small_engine(is_async=True, profile=str(path))


def make_engine(factor: float, *, is_async: bool = False, **options: object) -> VirtualEngine:
    """An engine that takes all its steps for so many times longer than they are."""
    engine = small_engine(is_async=is_async, **options)
    warm_up(engine)
    step_until(engine, lambda: False)
    cost = engine.scheduler.sola_monitor.cost
    for shape, true_s in [(shape, cost.step_s(shape)) for shape in _KINDS]:
        for _ in range(10):
            cost.observe(shape, factor * true_s)
    return engine


def outcomes(
    engine: VirtualEngine,
    count: int,
    *,
    name: str = "r",
    prompt_len: int = 200,
    output_len: int = 20,
    **options: Any,
) -> list[bool]:
    """Whether each of so many requests, on an idle engine one after the other, was served."""
    names = [f"{name}{number}" for number in range(count)]
    for each in names:
        lengths = {"prompt_len": prompt_len, "output_len": output_len}
        engine.add(VirtualRequest(each, engine.clock.now, **lengths, **options))
        step_until(engine, lambda: False)
    return [engine.record(each).is_finished for each in names]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("factor", [100.0, 200.0])
def test_an_idle_engine_serves_again_whatever_it_takes_its_steps_for(
    factor: float, is_async: bool
) -> None:
    served = outcomes(make_engine(factor, is_async=is_async), 120)

    assert not any(served[:8])
    assert served[8]
    assert all(served[-20:])


def test_who_cannot_be_in_time_is_refused_but_for_one_in_nine() -> None:
    engine = make_engine(1.0)
    for number in range(27):
        # A step takes 10 ms at least.
        engine.add(
            VirtualRequest(
                f"r{number}",
                engine.clock.now,
                prompt_len=200,
                output_len=4,
                extra_args={"ttft_slo_ms": 5.0},
            )
        )
        step_until(engine, lambda: False)

    served = [engine.record(f"r{number}").is_finished for number in range(27)]
    assert [place for place, is_served in enumerate(served) if is_served] == [8, 17, 26]


def test_answers_that_have_to_end_in_time_are_served_again_too() -> None:
    engine = make_engine(100.0, is_async=True, classes={"job": {"e2e_s": 5.0}})
    served = outcomes(engine, 40, extra_args=_JOB)

    assert not any(served[:8])
    assert served[8]
    assert all(served[-20:])


def test_outputs_that_have_become_short_are_learned() -> None:
    engine = with_jobs(10.0)
    job = {"max_tokens": 1500, "extra_args": _JOB}
    taught = outcomes(engine, 60, name="long", output_len=1200, **job)
    served = outcomes(engine, 240, name="short", output_len=50, **job)

    assert any(taught)
    assert all(served[-60:])


def test_prompts_that_came_before_an_idle_time_take_no_time_of_one_that_is_alone() -> None:
    engine = with_jobs(3.0)
    taught = outcomes(engine, 30, name="t", output_len=50, max_tokens=200, extra_args=_JOB)
    outcomes(engine, 200, name="one token", prompt_len=900, output_len=1, max_tokens=1)
    served = outcomes(engine, 30, output_len=50, max_tokens=200, extra_args=_JOB)

    assert all(taught)
    assert all(served)


@pytest.mark.parametrize("coefficients", [_STEEP, _DEAR])
def test_prompts_that_never_run_beside_decodes_are_priced_as_they_run(
    coefficients: Coefficients, tmp_path: Path
) -> None:
    engine = with_profile(coefficients, tmp_path)
    served = outcomes(engine, 100, prompt_len=1450, output_len=5)

    assert all(served[-50:])


def test_long_prompts_are_served_again_while_all_short_ones_are(tmp_path: Path) -> None:
    engine = with_profile(_STEEP, tmp_path)
    for number in range(480):
        engine.add(VirtualRequest(f"s{number}", 0.25 * number, prompt_len=40, output_len=10))
    for number in range(60):
        engine.add(VirtualRequest(f"l{number}", 2.0 * number, prompt_len=1450, output_len=5))
    step_until(engine, lambda: False, 20_000)

    served = [engine.record(f"l{number}").is_finished for number in range(60)]
    assert not any(served[:8])
    assert all(served[-30:])
    assert all(engine.record(f"s{number}").is_finished for number in range(480))
