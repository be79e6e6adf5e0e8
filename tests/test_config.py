"""Options and per-request keys: what is accepted, and what the refusals say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sola_sched.config import SolaConfig
from sola_sched.errors import ConfigError, SloError
from sola_sched.slo import SloTarget, request_target

CLASSES = {"chat": SloTarget(0.5, 0.05), "batch": SloTarget()}
DEFAULT = SloTarget(1.0, 0.1)


def test_the_default_is_usable_as_it_is() -> None:
    assert SolaConfig.from_mapping(None) == SolaConfig()
    assert SolaConfig().default_slo == SloTarget(2.0, 0.1)


def test_null_disables_an_objective() -> None:
    config = SolaConfig.from_mapping({"ttft_s": None, "tpot_s": None})
    assert config.default_slo.is_unlimited


def test_classes_are_read() -> None:
    config = SolaConfig.from_mapping({"classes": {"chat": {"ttft_s": 0.5}, "b": {"tpot_s": None}}})
    assert config.classes == {"chat": SloTarget(0.5, math.inf), "b": SloTarget()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "paper"}, r"Unknown option 'polcy'.*known options: policy, ttft_s"),
        ({"policy": "best"}, r"'policy' must be one of attain, paper, alise \(got 'best'\)"),
        ({"policy": ["attain"]}, r"'policy' must be one of"),
        ({"ttft_s": 0}, r"'ttft_s' must be a number in \(0, inf\) \(got 0\)"),
        ({"tpot_s": "fast"}, r"'tpot_s' must be a number.*got 'fast'"),
        ({"tpot_s": True}, r"'tpot_s' must be a number"),
        ({"best_effort_share": 1.0}, r"'best_effort_share' must be a number in \[0, 1\)"),
        ({"alpha": 0}, r"'alpha' must be a number in \(0, 1\]"),
        ({"tile": 1.5}, r"'tile' must be an integer >= 1 \(got 1.5\)"),
        ({"window": 0}, r"'window' must be an integer >= 1"),
        ({"levels": 0}, r"'levels' must be an integer >= 1"),
        ({"aging_s": 0}, r"'aging_s' must be a number in \(0, inf\) \(got 0\); use null"),
        ({"overload": "drop"}, r"'overload' must be one of defer, reject"),
        ({"profile": 3}, r"'profile' must be a path or null"),
        ({"predictor": "crystal"}, r"'predictor' must be one of histogram, lexical, retrieval"),
        ({"predictor_path": 3}, r"'predictor_path' must be a path or null"),
        ({"predictor_save_s": -1}, r"'predictor_save_s' must be a number in"),
        ({"predictor_save_s": 60}, r"'predictor_save_s' 60 needs 'predictor_path'"),
        ({"classes": []}, r"'classes' must map names to targets"),
        ({"classes": {"a": {"ttft": 1}}}, r"SLO class 'a' must be an object with"),
        ({"classes": {"a": {"ttft_s": -1}}}, r"SLO class 'a': 'ttft_s' must be"),
        (["policy"], r"'sola_sched' must be an object of options"),
        ({"swap": "raw"}, r"'swap' must be an object of options"),
        ({"swap": {"gib": 1}}, r"Unknown option 'gib' in 'swap'; known options: mode, host_gib"),
        (
            {"swap": {"mode": "int4"}},
            r"'swap.mode' must be one of auto, raw, int8, off \(got 'int4'\)",
        ),
        ({"swap": {"host_gib": -1}}, r"'swap.host_gib' must be a number in \[0, inf\) \(got -1\)"),
        ({"swap": {"group_tokens": 0}}, r"'swap.group_tokens' must be an integer >= 1"),
        ({"swap": {"group_tokens": "all"}}, r"use 'whole' for one group"),
        ({"swap": {"segment_tokens": 1.5}}, r"'swap.segment_tokens' must be an integer >= 1"),
        ({"swap": {"ahead": 2}}, r"'swap.ahead' must be true or false \(got 2\)"),
    ],
)
def test_bad_options_are_refused_by_name_value_and_rule(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_mapping(options)


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, DEFAULT),
        ({"temperature_of_the_room": 21}, DEFAULT),
        ({"ttft_slo_ms": 250}, SloTarget(0.25, 0.1)),
        ({"tpot_slo_ms": 20.0, "ttft_slo_ms": None}, SloTarget(1.0, 0.02)),
        ({"slo_class": "chat"}, SloTarget(0.5, 0.05)),
        ({"slo_class": "chat", "tpot_slo_ms": 10}, SloTarget(0.5, 0.01)),
        ({"slo_class": "batch"}, SloTarget()),
    ],
)
def test_request_keys_override_the_default(extra_args: Any, expected: SloTarget) -> None:
    assert request_target(extra_args, DEFAULT, CLASSES) == expected


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"ttft_slo_ms": -5}, r"'ttft_slo_ms' must be a finite number of milliseconds > 0.*-5"),
        ({"tpot_slo_ms": "abc"}, r"'tpot_slo_ms' must be .*got 'abc'"),
        ({"tpot_slo_ms": True}, r"'tpot_slo_ms' must be"),
        ({"tpot_slo_ms": math.inf}, r"'tpot_slo_ms' must be a finite"),
        ({"ttft_slo_ms": [1]}, r"'ttft_slo_ms' must be"),
        ({"slo_class": "nope"}, r"'slo_class' must name a configured SLO class.*batch, chat"),
        ({"slo_class": 3}, r"'slo_class' must name"),
    ],
)
def test_bad_request_keys_are_refused_by_key_value_and_rule(extra_args: Any, message: str) -> None:
    with pytest.raises(SloError, match=message):
        request_target(extra_args, DEFAULT, CLASSES)


def test_a_target_must_be_positive() -> None:
    with pytest.raises(SloError, match=r"'tpot_s' must be a number of seconds > 0 \(got 0\)"):
        SloTarget(1.0, 0)
