"""A target that is shorter than one step of the model is said once for each class."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, warm_up

import sola_sched
from sola_sched.simulator import VirtualRequest

pytestmark = pytest.mark.vllm


def test_a_target_below_a_step_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = {"fast": {"tpot_s": 0.001}, "usual": {"tpot_s": 0.1}}
    options = {"ttft_s": 1.0, "tpot_s": 0.05, "classes": classes, "log_interval_s": 1}
    engine = make_small_engine(sola_sched.Scheduler, options)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    warm_up(engine)
    asked = [
        *({"slo_class": "fast"} for _ in range(3)), {"slo_class": "usual"}, {},
        *({"ttft_slo_ms": 2} for _ in range(3)),
    ]  # fmt: skip
    for number, extra_args in enumerate(asked):
        engine.add(
            VirtualRequest(
                f"r{number}", arrival_s=5.0 + number, prompt_len=20, output_len=4,
                extra_args=extra_args,
            )
        )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="vllm.sola_sched"):
        engine.run()
    # A line that reaches the handler by two ways is one line.
    records = {id(record): record for record in caplog.records}.values()
    told = [r.getMessage() for r in records if "shorter than one step" in r.getMessage()]
    assert [line.split(":")[1].strip() for line in told] == [
        "r0 (class fast)",
        "r5 (class default)",
    ]
    assert "no TTFT target, TPOT 0.001 s" in told[0]
