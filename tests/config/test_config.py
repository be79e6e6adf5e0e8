"""Options and per-request keys: what is accepted, and what the refusals say."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from sola_sched.config.slo import SloTarget, request_target
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError, SloError

CLASSES = {
    "chat": SloTarget(0.5, 0.05),
    "batch": SloTarget(),
    "tier": SloTarget(e2e_s=600.0, weight=2.0),
}
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
        (
            {"polcy": "paper"},
            r"Unknown option 'polcy' \(write 'policy'\) in .*; known options: policy, ",
        ),
        (
            {"policy": "best"},
            r"'policy' must be one of attain, .*doubling \(got 'best'\)",
        ),
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
        ({"polcy": 1, "x": 1}, r"Unknown options 'polcy' \(write 'policy'\), 'x' in 'sola_sched'"),
        ({"slo_ttft_s": 1}, r"Unknown option 'slo_ttft_s' \(write 'ttft_s', in seconds\)"),
        ({"ttft_ms": 500}, r"Unknown option 'ttft_ms' \(write 'ttft_s', in seconds\)"),
        (
            {"ttft-s": 1},
            r"Unknown option 'ttft-s' \(write 'ttft_s', in seconds\) in 'sola_sched'; ",
        ),
        ({"e2e_s": 0}, r"'e2e_s' must be a number in \(0, inf\) \(got 0\)"),
        ({"e2e_s": 1}, r"'e2e_s', the .* must be >= 'ttft_s' \(got 1 s and 2 s\); raise it"),
        ({"e2e_s": 0.05, "ttft_s": None}, r"must be >= 'tpot_s' \(got 0.05 s and 0.1 s\)"),
        ({"classes": {"a": {"e2e_s": 1, "ttft_s": 2}}}, r"SLO class 'a': 'e2e_s', .*'ttft_s'"),
        ({"classes": {"a": {"weight": 0}}}, r"SLO class 'a': 'weight' must be a finite number > 0"),
        ({"classes": {"a": {"weight": None}}}, r"'weight' must be a finite .*\(got None\)"),
        ({"classes": {"a": {"weight": math.inf}}}, r"'weight' must be a finite number"),
        ({"classes": []}, r"'classes' must map names to targets"),
        ({"classes": {"default": {"ttft_s": 1}}}, r"No SLO class may be named 'default'"),
        ({"classes": {"a": {"ttft_s": 10**400}}}, r"SLO class 'a': 'ttft_s' must be a number of"),
        ({"classes": {"a": {"weight": 10**5000}}}, r"'weight' .* \(got a number of thousands of"),
        ({"ttft_s": 10**400}, r"'ttft_s' must be a number in \(0, inf\) \(got 1000"),
        ({"max_wait_s": 10**400}, r"'max_wait_s' must be a number in"),
        ({"plan_limit_s": 10**400}, r"'plan_limit_s' must be a number in"),
        ({"tile": 2**63}, r"'tile' must be an integer 2\^53 at most \(got 9223372036854775808\)"),
        ({"classes": {"a": 1}}, r"SLO class 'a' must be an object with"),
        (
            {"classes": {"a": {"ttft": 1}}},
            r"Unknown option 'ttft' \(write 'ttft_s', in seconds\) in SLO class 'a'; known .*share",
        ),
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
    ("options", "message"),
    [
        ({"window": 4}, r"'window' has an effect with 'policy' 'paper' only \(got 'window' 4 with"),
        ({"levels": 4}, r"'levels' has an effect with 'policy' 'alise' only"),
        (
            {"aging_s": None, "policy": "paper"},
            r"'aging_s' .* \(got 'aging_s' None with 'policy' 'p",
        ),
        ({"best_effort_share": 0.1, "policy": "alise"}, r"'best_effort_share' .* 'attain' only"),
        ({"safety": 0.0, "policy": "paper"}, r"'safety' .* 'attain' only"),
        ({"tile": 16, "policy": "alise"}, r"'tile' .* 'attain' or 'paper' only"),
        (
            {"overload": "reject", "policy": "paper"},
            r"'overload' .* 'attain' or 'alise' or 'doubling' only",
        ),
        ({"predictor_path": "f"}, r"'predictor_path' .* 'predictor' 'lexical' or 'retrieval' only"),
        (
            {"predictor_path": "f", "predictor_save_s": 9},
            r"'predictor_(path|save_s)' has an effect",
        ),
        (
            {"predictor_encoder": "e", "predictor": "lexical"},
            r"'predictor_encoder' .* 'retrieval' only .*set 'predictor', or leave",
        ),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_mapping(options)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 8, "levels": 8, "predictor_encoder": None},  # as they are by default
        {"policy": "paper", "window": 4, "tile": 16},
        {"policy": "alise", "levels": 4, "aging_s": None, "overload": "reject"},
        {"predictor": "lexical", "predictor_path": "f", "predictor_save_s": 9},
        {"predictor": "retrieval", "predictor_path": "f", "predictor_encoder": "e"},
    ],
    ids=str,
)
def test_an_option_that_is_read_is_accepted(options: Any) -> None:
    SolaConfig.from_mapping(options)


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"sola-sched": {"ttft_s": 1}}, r"must be under 'sola_sched' \(got 'sola-sched'"),
        ({"sola": {}}, r"must be under 'sola_sched' \(got 'sola'"),
        ({"SolaSched": {}}, r"must be under 'sola_sched' \(got 'SolaSched'"),
        ({"sola_scheduler": {}}, r"must be under 'sola_sched' \(got 'sola_scheduler'"),
        ({"sola_sched": {}, "sola_shed": {}}, r"\(got 'sola_shed', which nothing reads\)"),
        ({"ttft_s": 1}, r"'ttft_s' must be under 'sola_sched' .*\{\"ttft_s\": ...\}"),
        ({"sola_sched": {}, "TPOT-S": 1}, r"'tpot_s' must be under 'sola_sched' .*\(got 'TPOT-S'"),
        ({"policy": "paper"}, r"'policy' must be under 'sola_sched'"),
    ],
)
def test_what_stands_beside_our_key_is_refused(additional: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_additional(additional)


@pytest.mark.parametrize(
    "additional",
    [
        None,
        {},
        {"sola_sched": {"ttft_s": 1.0}},
        {"ascend_scheduler_config": {"enabled": True}, "refresh": True, "solar": 1, "chaos": 3},
        {"sola_sched": {}, "profile": "another plug-in's"},
        object(),
    ],
    ids=["none", "empty", "ours", "theirs", "ours and theirs", "no mapping"],
)
def test_the_keys_of_other_plugins_stay_theirs(additional: Any) -> None:
    ours = (additional or {}).get("sola_sched") if type(additional) is not object else None
    assert SolaConfig.from_additional(additional) == SolaConfig.from_mapping(ours)


def test_a_class_says_what_it_has_not() -> None:
    classes = SolaConfig.from_mapping(
        {
            "classes": {
                "a": {"ttft_s": 0.5},
                "b": {"tpot_s": 0.05},
                "c": {},
                "d": {"ttft_s": 1, "tpot_s": 2},
                "e": {"e2e_s": 600, "weight": 3},
                "f": {"weight": 0.5, "ttft_s": None},
            }
        }
    ).classes
    assert {name: str(slo) for name, slo in classes.items()} == {
        "a": "TTFT 0.5 s, no TPOT target",
        "b": "no TTFT target, TPOT 0.05 s",
        "c": "no targets",
        "d": "TTFT 1 s, TPOT 2 s",
        "e": "no TTFT target, no TPOT target, last token 600 s, weight 3",
        "f": "no targets, weight 0.5",
    }


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ttft_slo", "ttft_slo_ms"),
        ("TTFT_SLO_MS", "ttft_slo_ms"),
        ("ttft-slo-ms", "ttft_slo_ms"),
        ("ttftSloMs", "ttft_slo_ms"),
        ("ttft_ms", "ttft_slo_ms"),
        ("ttft_s", "ttft_slo_ms"),
        ("slo_ttft_ms", "ttft_slo_ms"),
        ("slo_ttft", "ttft_slo_ms"),
        ("x-slo-tpot-ms", "tpot_slo_ms"),
        ("class_slo", "slo_class"),
        ("ttft", "ttft_slo_ms"),
        ("ttft_slo_s", "ttft_slo_ms"),
        ("tpot_ms", "tpot_slo_ms"),
        ("tpot_slo", "tpot_slo_ms"),
        ("tpto_slo_ms", "tpot_slo_ms"),
        ("tpot_s", "tpot_slo_ms"),
        ("e2e_slo", "e2e_slo_ms"),
        ("e2eSloMs", "e2e_slo_ms"),
        ("e2e", "e2e_slo_ms"),
        ("e2e_s", "e2e_slo_ms"),
        ("slo-class", "slo_class"),
        ("SLO_CLASS", "slo_class"),
        ("sloclas", "slo_class"),
    ],
)
def test_a_request_key_that_is_nearly_ours_is_refused_with_the_right_one(
    key: str, meant: str
) -> None:
    with pytest.raises(SloError, match=f"'{key}' must be written '{meant}'"):
        request_target({key: 100, "ttft_slo_ms": 100}, DEFAULT, CLASSES)


@pytest.mark.parametrize(
    "key",
    [
        *("class", "subclass", "session_id", "kv_transfer_params", "top_k", "ms", "slots", "spots"),
        *("timeout_ms", "priority_class", "t" * 10_000, ""),
    ],
)
def test_a_request_key_that_is_not_like_ours_stays_foreign(key: str) -> None:
    assert request_target({key: "x"}, DEFAULT, CLASSES) == DEFAULT


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
        ({"e2e_slo_ms": 1500}, SloTarget(1.0, 0.1, 1.5)),
        ({"ttft_slo_ms": "none", "tpot_slo_ms": "none"}, SloTarget()),
        ({"e2e_slo_ms": 500, "ttft_slo_ms": "none"}, SloTarget(math.inf, 0.1, 0.5)),
        ({"slo_class": "tier"}, SloTarget(e2e_s=600.0, weight=2.0)),
        ({"slo_class": "tier", "ttft_slo_ms": 6000}, SloTarget(6.0, e2e_s=600.0, weight=2.0)),
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
        ({"e2e_slo_ms": 0}, r"'e2e_slo_ms' must be a finite number of milliseconds > 0"),
        ({"e2e_slo_ms": "None"}, r"'e2e_slo_ms' must be .* or \"none\" for no such target"),
        (
            {"e2e_slo_ms": 900, "ttft_slo_ms": 901},
            r"'e2e_slo_ms', .* must be at least 'ttft_slo_ms' \(got 900 and 901, of .*; raise it",
        ),
        ({"e2e_slo_ms": 900}, r"at least 'ttft_slo_ms' \(got 900 and 1000, .*server's default"),
        ({"e2e_slo_ms": 50, "ttft_slo_ms": "none"}, r"at least 'tpot_slo_ms' \(got 50 and 100"),
        ({"slo_class": "tier", "tpot_slo_ms": 600001}, r"at least 'tpot_slo_ms' \(got 600000 and"),
        ({"slo_class": "nope"}, r"'slo_class' must name a configured SLO class.*batch, chat"),
        ({"slo_class": 3}, r"'slo_class' must name"),
    ],
)
def test_bad_request_keys_are_refused_by_key_value_and_rule(extra_args: Any, message: str) -> None:
    with pytest.raises(SloError, match=message):
        request_target(extra_args, DEFAULT, CLASSES)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"e2e_slo_ms": 9000}, SloTarget(5.0, 0.1, 8.5)),  # it began after 0.5 s
        ({"e2e_slo_ms": 4000}, SloTarget(3.5, 0.1, 3.5)),  # the end is due before the next token
        ({"e2e_slo_ms": 1000, "began_ms": 2000}, SloTarget(0.001, 0.001, 0.001)),
        ({"e2e_slo_ms": 9000, "tpot_slo_ms": "none"}, SloTarget(1.0, e2e_s=8.5)),
    ],
)
def test_what_is_left_of_the_time_to_the_last_token_of_one_that_is_resumed(
    keys: dict[str, Any], expected: SloTarget
) -> None:
    asked = {"resumed_tokens": 50, "waited_ms": 300.0, "began_ms": 500.0} | keys
    assert request_target(asked, DEFAULT, CLASSES) == expected


def test_very_many_keys_cost_little_and_hide_none_of_ours() -> None:
    foreign = {f"key {i}": i for i in range(10_000)}

    begin_s = time.process_time()
    target = request_target(foreign | {"ttft_slo_ms": 7.0}, DEFAULT, CLASSES)
    with pytest.raises(SloError, match="'slo_class' must name"):
        request_target(foreign | {"slo_class": "none"}, DEFAULT, CLASSES)

    assert target.ttft_s == 0.007
    assert time.process_time() - begin_s < 0.2


@pytest.mark.parametrize("key", ["waited_ms", "resumed_tokens", "began_ms"])
def test_a_number_beyond_any_is_refused(key: str) -> None:
    with pytest.raises(SloError, match=f"'{key}' must be"):
        request_target({"resumed_tokens": 1, "e2e_slo_ms": 9000} | {key: 10**400}, DEFAULT, CLASSES)


def test_a_target_must_be_positive() -> None:
    with pytest.raises(SloError, match=r"'tpot_s' must be a number of seconds > 0 \(got 0\)"):
        SloTarget(1.0, 0)
