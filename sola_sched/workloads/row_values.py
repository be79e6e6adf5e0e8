"""Single values of a data set's rows; each error says the rule, what was given, and where."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sola_sched.config.rules import shown
from sola_sched.errors import DatasetError

_MAX_COUNT = 2**31 - 1


def text_of(value: Any, name: str, where: str) -> str | None:
    """A text, without halves of surrogate pairs, which no tokenizer takes; None for null."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise DatasetError(f"{name!r} must be a text (got {shown(value)} in {where}).")
    return value.encode("utf-8", "replace").decode()


def turns_of(value: Any, where: str) -> tuple[str | None, str | None]:
    """Prompt and answer: the first two turns of a ShareGPT conversation, as vllm bench serve."""
    rule = f"'conversations' must be a list of objects with a text 'value' ({where} has "
    if not isinstance(value, list):
        raise DatasetError(f"{rule}{shown(value)}).")
    for turn in value[:2]:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise DatasetError(f"{rule}{shown(turn)}).")
    if len(value) < 2:
        return None, None
    prompt, answer = (text_of(turn["value"], "value", where) for turn in value[:2])
    return prompt, answer


def longest_of(value: Any, where: str) -> str:
    """The longest of several answers."""
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list):
        raise DatasetError(f"'answers' must be a list of texts (got {shown(value)} in {where}).")
    texts = [text_of(answer, "answers", where) or "" for answer in answers]
    return max(texts, key=len, default="")


def count_of(value: Any, where: str) -> int | None:
    """A token count; of several (one per model or temperature) the median. None for null."""
    if value is None:
        return None
    given = list(value.values()) if isinstance(value, Mapping) else value
    counts = [_number(each) for each in (given if isinstance(given, list) else [given])]
    if not counts or not all(0 <= n <= _MAX_COUNT and n == int(n) for n in counts):
        raise DatasetError(
            f"A token count must be a whole number from 0 to {_MAX_COUNT:,} "
            f"(got {shown(value)} in {where})."
        )
    return int(statistics.median_low(counts))


def target_of(value: Any, name: str, where: str) -> float | None:
    """A target in milliseconds, > 0; None for null and for an empty cell."""
    if value is None or value == "":
        return None
    target = _number(value)
    if not 0 < target < math.inf:
        raise DatasetError(
            f"{name!r} must be a finite number > 0 (got {shown(value)} in {where}); "
            "leave it out for none."
        )
    return target


def seconds_of(value: Any, where: str, factor: float = 1.0) -> float:
    """An arrival time, a finite number."""
    seconds = _number(value) * factor
    if not math.isfinite(seconds):
        raise DatasetError(
            f"An arrival time must be a finite number (got {shown(value)} in {where})."
        )
    return seconds


def date_of(value: Any, where: str) -> float:
    """An arrival time that is a date with up to 7 decimals of a second, as in Azure's traces."""
    try:
        text = re.sub(r"(\.\d{6})\d+", r"\1", value)
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise DatasetError(
            f"'TIMESTAMP' must be a date such as 2023-11-16 18:15:46.6805900 "
            f"(got {shown(value)} in {where})."
        ) from error


def block_ids_of(value: Any, where: str) -> tuple[int, ...]:
    """Ids of a prompt's blocks; none for null."""
    if value is None or value == "":
        return ()
    if not isinstance(value, list) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    ):
        raise DatasetError(
            f"'hash_ids' must be a list of whole numbers >= 0 (got {shown(value)} in {where})."
        )
    return tuple(value)


def _number(value: Any) -> float:
    """A number, or a text of one as in CSV; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
