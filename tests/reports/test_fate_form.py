"""Requests that were read have the form in which they are told, or it is said what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fates import a_fate

from sola_sched.reports.fate_form import problem_of
from sola_sched.reports.fates import tpot_s


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"end": "missed", "first_token_s": 13.0, "alone_s": 0.0, "priority": -3, "engine": 1},
        {"priority": 1_700_000_000_000_000_000, "ttft_s": 1e17, "e2e_s": 1e300, "need_s": 1e17},
        {"priority": -(2**63)},
        {"end": "rejected", "started_s": float("nan"), "first_token_s": float("nan"),
         "last_token_s": float("nan"), "num_output": 0},
    ],
)  # fmt: skip
def test_what_is_told_has_the_form(fields: dict[str, Any]) -> None:
    engine = {"engine": fields.pop("engine")} if "engine" in fields else {}
    fate = json.loads(json.dumps(a_fate(**fields) | engine | {"of_a_later_release": []}))
    assert problem_of(fate) is None


@pytest.mark.parametrize("name", sorted(a_fate()))
def test_no_field_may_lack_or_be_of_another_type(name: str) -> None:
    fate = a_fate()
    assert problem_of({k: v for k, v in fate.items() if k != name}) == f"it has no {name!r}"
    assert problem_of(fate | {name: {}}) == f"{name!r} is {{}}"
    assert problem_of(fate | {name: True}) == f"{name!r} is True"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"end": "lost"}, "'end' is lost"),
        ({"missed": ["itl"]}, "'missed' is ['itl']"),
        ({"missed": ["e2e"]}, "'missed' names 'e2e', but it has no such target"),
        ({"arrival_s": None}, "'arrival_s' is None"),
        ({"arrival_s": float("nan")}, "'arrival_s' is nan"),
        ({"ended_s": 10**400}, "'ended_s' is 1000000000000000000000000000000000000000"),
        ({"num_output": -1}, "'num_output' is -1"),
        ({"num_output": 10**16}, "'num_output' is 10000000000000000"),
        ({"priority": 2**63}, "'priority' is 9223372036854775808"),
        ({"priority": 0.5}, "'priority' is 0.5"),
        ({"ttft_s": float("inf")}, "'ttft_s' is inf"),
        ({"need_s": 10**400}, "'need_s' is 1000000000000000000000000000000000000000"),
        ({"num_prompt": 1.5}, "'num_prompt' is 1.5"),
        ({"engine": "0"}, "'engine' is 0"),
        ({"waited_for_slot_s": None}, "'waited_for_slot_s' is None"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], said: str) -> None:
    assert problem_of(a_fate() | fields) == said


def test_what_is_no_object_is_said() -> None:
    assert problem_of(["a"]) == "it is no object: ['a']"


def test_without_a_last_token_there_is_no_time_per_token() -> None:
    fate = a_fate() | {"last_token_s": None}
    assert problem_of(fate) is None
    assert tpot_s(fate) is None
