"""Targets that were probably meant to be milliseconds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sola_sched.config.doubts import doubts
from sola_sched.config.sola_config import SolaConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"ttft_s": 30, "tpot_s": 1, "e2e_s": 600}, []),
        ({"ttft_s": None, "tpot_s": None}, []),
        (
            {"ttft_s": 500, "tpot_s": 50},
            ["'ttft_s' is 500 seconds.*milliseconds write 0.5", "'tpot_s' is 50 .* write 0.05"],
        ),
        ({"classes": {"a": {"tpot_s": 40}, "b": {}}}, ["'tpot_s' of class 'a' is 40 seconds"]),
    ],
)
def test_milliseconds_in_the_place_of_seconds_are_doubted(
    options: dict[str, Any], expected: list[str]
) -> None:
    found = doubts(SolaConfig.from_mapping(options))
    assert len(found) == len(expected)
    for text, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, text)
