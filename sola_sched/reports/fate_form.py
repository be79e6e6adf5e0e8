"""Whether a request that was read has the form of `fates.fate_of`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sola_sched.core.fates import ENDS, FATE
from sola_sched.reports.fates import WAITED

_ALWAYS = ("arrival_s", "ended_s", "held_s", *WAITED)
#: Counts below 0: without a prediction.
_LEAST = {"predicted": -1}
#: Clients choose these: any number that the server takes.
_OF_CLIENTS = ("ttft_s", "tpot_s", "e2e_s", "need_s")
_TARGETS = ("ttft", "tpot", "e2e")
#: No time and no count of an engine comes near.
_MOST = 1e15
_MOST_PRIORITY = 2**63
#: All that is finite is below.
_INFINITE = 2**1024


def problem_of(fate: Any) -> str | None:
    """What is wrong with it, as the end of a sentence; None if nothing is."""
    if not isinstance(fate, Mapping):
        return f"it is no object: {str(fate)[:40]}"
    for name in (*(FATE.names or ()), *WAITED, "request_id", "slo_class", "missed"):
        if name != "waited_s" and name not in fate:
            return f"it has no {name!r}"
    for name, value in fate.items():
        if not _is_right(name, value):
            return f"{name!r} is {str(value)[:40]}"
    for name in fate["missed"]:
        if fate[f"{name}_s"] is None:
            return f"'missed' names {name!r}, but it has no such target"
    return None


def _is_right(name: str, value: Any) -> bool:
    if name in ("request_id", "slo_class"):
        return isinstance(value, str)
    if name == "end":
        return isinstance(value, str) and value in ENDS
    if name == "missed":
        return isinstance(value, list) and all(each in _TARGETS for each in value)
    if name == "engine":
        return _is_count(value, 0)
    if name in WAITED:
        return _is_time(value)
    if name not in (FATE.names or ()):
        return True  # of a later release
    if name == "priority":
        return _is_count(value, -_MOST_PRIORITY, _MOST_PRIORITY)
    if name in _OF_CLIENTS:
        return value is None or _is_time(value, _INFINITE)
    if FATE[name].kind == "i":
        return _is_count(value, _LEAST.get(name, 0))
    return _is_time(value) or (value is None and name not in _ALWAYS)


def _is_count(value: Any, least: float, end: float = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _is_time(value: Any, end: float = _MOST) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < end  # and no NaN
