"""Guaranteed shares: where they are set, and which cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError


def test_a_share_is_one_of_the_options_of_a_class() -> None:
    config = SolaConfig.from_mapping(
        {"classes": {"chat": {"ttft_s": 0.5, "share": 0.3}, "batch": {"share": None}}}
    )

    assert config.shares == {"chat": 0.3}
    assert config.classes == {"chat": SloTarget(0.5), "batch": SloTarget()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": {"a": {"share": 0}}}, r"'share' of class 'a' must be .* \(got 0\)"),
        ({"classes": {"a": {"share": 1.0}}}, r"'share' of class 'a' must be .* \(got 1.0\)"),
        ({"classes": {"a": {"share": "x"}}}, r"'share' of class 'a' must be .* \(got 'x'\)"),
        (
            {"classes": {"a": {"share": 0.5}, "b": {"share": 0.49}}},
            r"at most 1 \(got 0.99, and 0.02\)",
        ),
        ({"policy": "paper", "classes": {"a": {"share": 0.5}}}, r"'share' has an effect with"),
        ({"shares": {"a": 0.5}}, r"Unknown option 'shares'"),
    ],
)
def test_shares_that_cannot_be_kept_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_mapping(options)


def test_a_share_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"configured class \(got 'b'; known: a\)"):
        SolaConfig(classes={"a": SloTarget()}, shares={"b": 0.5})


def test_all_of_the_time_may_be_shared_where_nothing_is_kept_for_the_lost() -> None:
    classes = {"a": {"share": 0.5}, "b": {"share": 0.49}}

    assert SolaConfig.from_mapping({"policy": "alise", "classes": classes}).shares["b"] == 0.49
