"""Rules for options that an operator sets; every error says what must hold and what was given."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from sola_sched.errors import ConfigError

_MAX_SHOWN = 80
#: Beyond it a float does not hold every whole number.
_MOST_COUNT = 2**53


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Require one of the `allowed` words."""
    if value not in allowed:
        raise ConfigError(f"'{name}' must be one of {', '.join(allowed)} (got {value!r}).")


def number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    hint: str = "",
) -> None:
    """Require a number between `low` and `high`; an open end excludes its limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and (low < value if low_open else low <= value)
    # A whole number from JSON may be beyond what a float holds.
    high_open, most = high_open or math.isinf(high), sys.float_info.max
    inside = inside and (value < high if high_open else value <= high) and value <= most
    if not inside:
        left = "(" if low_open else "["
        right = ")" if high_open else "]"
        raise ConfigError(
            f"'{name}' must be a number in {left}{low:g}, {high:g}{right} (got {shown(value)})"
            f"{'; ' + hint if hint else ''}."
        )


def flag(name: str, value: Any) -> None:
    """Require true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"'{name}' must be true or false (got {value!r}).")


def count(name: str, value: Any, hint: str = "") -> None:
    """Require an integer >= 1 that compiled code can hold."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= _MOST_COUNT:
        rule = "2^53 at most" if is_whole and value > _MOST_COUNT else ">= 1"
        raise ConfigError(
            f"'{name}' must be an integer {rule} (got {shown(value)}){'; ' + hint if hint else ''}."
        )


def plain(name: str) -> str:
    """A name without case, dashes and the like: names that differ in these alone are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was meant to be, or None if it is like none of them."""
    names = list(names)
    by_plain = {plain(each): each for each in names}
    found = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.8)
    if not found and len(_words(name)) > 1:  # the words in another order, or one too many
        by_plain = {" ".join(_words(each)): each for each in names}
        found = difflib.get_close_matches(" ".join(_words(name)), by_plain, n=1, cutoff=0.75)
    return by_plain[found[0]] if found else None


def _words(name: str) -> list[str]:
    return sorted(re.findall(r"[a-z0-9]+", name.lower()))


def option_names(cls: type[Any]) -> list[str]:
    """Fields of the dataclass `cls` that an operator sets by their names."""
    return [f.name for f in dataclasses.fields(cls) if f.metadata.get("is_option", True)]


def known(cls: type[Any], names: Iterable[str], where: str) -> None:
    """Require `names` to be fields of the dataclass `cls`, which is the option `where`."""
    known_names(option_names(cls), names, f"'{where}'")


def known_names(fields: Sequence[str], names: Iterable[str], where: str, listed: str = "") -> None:
    """Require `names` to be of `fields`; `where` they are to be found, for the message.

    Args:
        listed: What the message ends with; a list of all `fields` without.
    """
    unknown = sorted(set(names) - set(fields), key=str)
    if unknown:
        shown_names = ", ".join(f"{each!r}{_advice(str(each), fields)}" for each in unknown)
        raise ConfigError(
            f"Unknown option{'s' if len(unknown) > 1 else ''} {shown_names} in {where}; "
            f"{listed or 'known options: ' + ', '.join(fields)}."
        )


def _advice(name: str, fields: Sequence[str]) -> str:
    near = nearest(name, fields)
    if near is None:
        return ""
    return f" (write {near!r}{', in seconds' if near.endswith('_s') else ''})"


def shown(value: Any) -> str:
    """The value for a message, in one short line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
