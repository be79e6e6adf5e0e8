"""Service-level objectives: defaults, classes and the per-request keys that override them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sola_sched.config.rules import nearest, plain, shown
from sola_sched.errors import SloError

#: Per-request keys read from ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
TTFT_KEY = "ttft_slo_ms"
TPOT_KEY = "tpot_slo_ms"
E2E_KEY = "e2e_slo_ms"
CLASS_KEY = "slo_class"
TARGET_KEYS = (TTFT_KEY, TPOT_KEY, E2E_KEY)
REQUEST_KEYS = (*TARGET_KEYS, CLASS_KEY)
#: Value of `TARGET_KEYS` for no such target.
NO_TARGET = "none"
#: Written by a gateway that sends a request again: milliseconds since it came or, with the number
#: of output tokens that its client has already, since the first of them was sent.
WAITED_KEY = "waited_ms"
RESUMED_KEY = "resumed_tokens"
#: With them, milliseconds that the first of those tokens took.
BEGAN_KEY = "began_ms"
GATEWAY_KEYS = (WAITED_KEY, RESUMED_KEY, BEGAN_KEY)
#: Names that are not like the key they stand for, plain.
_OTHER_NAMES = {
    "ttft": TTFT_KEY, "ttfts": TTFT_KEY, "tpot": TPOT_KEY, "tpots": TPOT_KEY,
    "e2e": E2E_KEY, "e2es": E2E_KEY, "e2el": E2E_KEY,
}  # fmt: skip
#: Fields of `SloTarget` that are targets, and how they are called.
TARGETS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "last token"}
_LONGEST_NAME = 40
#: Of one request's keys: to compare one with ours takes a tenth of a millisecond.
_MOST_COMPARED = 64
#: Most of a client's number: a whole one from JSON may be beyond what a float holds.
MOST = sys.float_info.max
#: What is left at least of a target that is missed already, seconds.
_LEAST_S = 1e-3
#: Name under which requests without an SLO class are reported.
DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class SloTarget:
    """The latency targets of one request, and what it is worth to meet all of them.

    Attributes:
        ttft_s: Longest time from arrival to first output token, seconds, > 0;
            ``inf`` means no objective.
        tpot_s: Longest mean time per output token after the first, seconds, > 0;
            ``inf`` means no objective.
        e2e_s: Longest time from arrival to last output token, seconds, > 0 and no less than either
            of the others; ``inf`` means no objective.
        weight: What one such request is worth that meets its targets, > 0.
        max_wait_s: After so long, seconds, > 0, a request that misses its targets anyway is served
            next, or refused where such are; ``inf`` means never.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
    weight: float = 1.0
    max_wait_s: float = math.inf

    def __post_init__(self) -> None:
        for name in (*TARGETS, "max_wait_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not value > 0 or MOST < value < math.inf:
                raise SloError(
                    f"'{name}' must be a number of seconds > 0 (got {shown(value)}); use null for "
                    "none."
                )
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if self.e2e_s < value < math.inf:
                raise SloError(
                    f"'e2e_s', the time to the last token, must be >= '{name}' (got {self.e2e_s:g} "
                    f"s and {value:g} s); raise it, or lower or disable '{name}'."
                )
        worth: Any = self.weight
        is_number = isinstance(worth, int | float) and not isinstance(worth, bool)
        if not is_number or not 0 < worth <= MOST:
            raise SloError(f"'weight' must be a finite number > 0 (got {shown(worth)}).")

    @property
    def is_unlimited(self) -> bool:
        """True when no objective is set."""
        return self.ttft_s == self.tpot_s == self.e2e_s == math.inf

    def __str__(self) -> str:
        parts = (
            ["no targets"]
            if self.is_unlimited
            else [
                f"no {word} target" if math.isinf(seconds) else f"{word} {seconds:g} s"
                for name, word in TARGETS.items()
                if math.isfinite(seconds := getattr(self, name)) or name != "e2e_s"
            ]
        )
        parts += [f"weight {self.weight:g}"] * (self.weight != 1.0)
        parts += [f"waits {self.max_wait_s:g} s at most"] * math.isfinite(self.max_wait_s)
        return ", ".join(parts)


def meant_key(name: Any) -> str | None:
    """The key of ours that a request's key is or was meant to be; None for foreign ones."""
    if name in REQUEST_KEYS or name in GATEWAY_KEYS:
        return str(name)
    # Clients choose these names: long ones are not looked at.
    return _near_key(name) if isinstance(name, str) and len(name) <= _LONGEST_NAME else None


def meant_keys(names: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Those of a request's keys that are or were meant to be ours, each with the key of ours.

    Of very many the later ones are not compared: then only ours themselves are found.
    """
    for i, name in enumerate(names):
        if i < _MOST_COMPARED:
            meant = meant_key(name)
        else:
            meant = name if name in REQUEST_KEYS or name in GATEWAY_KEYS else None
        if meant is not None:
            yield name, meant


@lru_cache(maxsize=1024)
def _near_key(name: str) -> str | None:
    return _OTHER_NAMES.get(plain(name)) or nearest(name, REQUEST_KEYS)


def request_target(
    extra_args: Mapping[str, Any] | None,
    default: SloTarget,
    classes: Mapping[str, SloTarget],
) -> SloTarget:
    """Resolve the targets of one request from its flat per-request keys.

    ``slo_class`` picks a configured class; ``ttft_slo_ms``, ``tpot_slo_ms`` and ``e2e_slo_ms``
    (milliseconds, or `NO_TARGET`) then override single targets. Keys that are absent or None leave
    the default in force. Of a request that is resumed, whose time runs from its first token, the
    next token is due when TPOT says so: `RESUMED_KEY` times that after the first one.

    Args:
        extra_args: The request's free arguments, or None. Foreign keys are ignored, unless they
            are nearly ours.
        default: Targets when a request says nothing.
        classes: Name to targets.

    Raises:
        SloError: A key of ours has a wrong type or value, or names an unknown class, or a key is
            nearly one of ours; or the targets contradict each other.
    """
    if not extra_args:
        return default
    for key, meant in meant_keys(extra_args):
        if meant != key:
            unit = "" if meant == CLASS_KEY else ", in milliseconds"
            raise SloError(
                f"{key!r} must be written '{meant}'{unit} (the keys for targets are "
                f"{', '.join(REQUEST_KEYS)})."
            )
    target = default
    name = extra_args.get(CLASS_KEY)
    if name is not None:
        if not isinstance(name, str) or name not in classes:
            known = ", ".join(sorted(classes)) or "none configured"
            raise SloError(
                f"'{CLASS_KEY}' must name a configured SLO class (got {name!r}; known: {known})."
            )
        target = classes[name]
    ttft_s = _milliseconds(extra_args, TTFT_KEY, target.ttft_s)
    tpot_s = _milliseconds(extra_args, TPOT_KEY, target.tpot_s)
    e2e_s = _milliseconds(extra_args, E2E_KEY, target.e2e_s)
    _refuse_contradiction(ttft_s, tpot_s, e2e_s)
    _, num_resumed = history(extra_args)
    if num_resumed:
        e2e_s = max(e2e_s - _waited(extra_args, BEGAN_KEY), _LEAST_S)
        ttft_s = min(ttft_s if math.isinf(tpot_s) else num_resumed * tpot_s, e2e_s)
        tpot_s = min(tpot_s, e2e_s) if tpot_s < math.inf else tpot_s
    if (ttft_s, tpot_s, e2e_s) == (target.ttft_s, target.tpot_s, target.e2e_s):
        return target
    return replace(target, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def _refuse_contradiction(ttft_s: float, tpot_s: float, e2e_s: float) -> None:
    """As `SloTarget` does, in the words of a request."""
    for key, seconds in ((TTFT_KEY, ttft_s), (TPOT_KEY, tpot_s)):
        if e2e_s < seconds < math.inf:
            raise SloError(
                f"'{E2E_KEY}', the time to the last token, must be at least '{key}' (got "
                f"{1e3 * e2e_s:g} and {1e3 * seconds:g}, of the request, its class or the server's "
                f"default); raise it, or give a shorter '{key}' or \"{NO_TARGET}\"."
            )


def history(extra_args: Mapping[str, Any] | None) -> tuple[float, int]:
    """What a request has behind it that a gateway sends again; nothing for any other.

    Returns:
        Seconds since it came, or since the first of its tokens was sent; and how many were.

    Raises:
        SloError: They are no time >= 0 and no count.
    """
    waited_s = _waited(extra_args or {}, WAITED_KEY)
    num_resumed = (extra_args or {}).get(RESUMED_KEY) or 0
    is_count = isinstance(num_resumed, int) and not isinstance(num_resumed, bool)
    if not is_count or not 0 <= num_resumed < MOST:
        raise SloError(f"'{RESUMED_KEY}' must be a number of tokens >= 0 (got {num_resumed!r}).")
    return waited_s, num_resumed


def _waited(extra_args: Mapping[str, Any], key: str) -> float:
    """Seconds that a gateway's key says; 0 without it."""
    value = extra_args.get(key) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST:
        raise SloError(f"'{key}' must be milliseconds >= 0 (got {value!r}).")
    return value / 1e3


def _milliseconds(extra_args: Mapping[str, Any], key: str, fallback_s: float) -> float:
    value = extra_args.get(key)
    if value is None:
        return fallback_s
    if value == NO_TARGET:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
        raise SloError(
            f"'{key}' must be a finite number of milliseconds > 0 (got {value!r}); "
            f'leave it out to use the server\'s default, or "{NO_TARGET}" for no such target.'
        )
    return float(value) / 1e3
