"""Service-level objectives: defaults, classes and the per-request keys that override them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sola_sched.config.rules import nearest, plain
from sola_sched.errors import SloError

#: Per-request keys read from ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
TTFT_KEY = "ttft_slo_ms"
TPOT_KEY = "tpot_slo_ms"
CLASS_KEY = "slo_class"
REQUEST_KEYS = (TTFT_KEY, TPOT_KEY, CLASS_KEY)
#: Written by a gateway that sends a request again: milliseconds since it came or, with the number
#: of output tokens that its client has already, since the first of them was sent.
WAITED_KEY = "waited_ms"
RESUMED_KEY = "resumed_tokens"
GATEWAY_KEYS = (WAITED_KEY, RESUMED_KEY)
#: Names that are not like the key they stand for, plain.
_OTHER_NAMES = {"ttft": TTFT_KEY, "ttfts": TTFT_KEY, "tpot": TPOT_KEY, "tpots": TPOT_KEY}
_LONGEST_NAME = 40
#: Name under which requests without an SLO class are reported.
DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class SloTarget:
    """The two latency targets of one request.

    Attributes:
        ttft_s: Longest time from arrival to first output token, seconds, > 0;
            ``inf`` means no objective.
        tpot_s: Longest mean time per output token after the first, seconds, > 0;
            ``inf`` means no objective.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise SloError(
                    f"'{name}' must be a number of seconds > 0 (got {value!r}); "
                    f"use null to disable this objective."
                )

    @property
    def is_unlimited(self) -> bool:
        """True when neither objective is set."""
        return math.isinf(self.ttft_s) and math.isinf(self.tpot_s)

    def __str__(self) -> str:
        if self.is_unlimited:
            return "no targets"
        ttft = "no TTFT target" if math.isinf(self.ttft_s) else f"TTFT {self.ttft_s:g} s"
        tpot = "no TPOT target" if math.isinf(self.tpot_s) else f"TPOT {self.tpot_s:g} s"
        return f"{ttft}, {tpot}"


def meant_key(name: Any) -> str | None:
    """The key of ours that a request's key is or was meant to be; None for foreign ones."""
    if name in REQUEST_KEYS or name in GATEWAY_KEYS:
        return str(name)
    # Clients choose these names: long ones are not looked at.
    return _near_key(name) if isinstance(name, str) and len(name) <= _LONGEST_NAME else None


@lru_cache(maxsize=1024)
def _near_key(name: str) -> str | None:
    return _OTHER_NAMES.get(plain(name)) or nearest(name, REQUEST_KEYS)


def request_target(
    extra_args: Mapping[str, Any] | None,
    default: SloTarget,
    classes: Mapping[str, SloTarget],
) -> SloTarget:
    """Resolve the targets of one request from its flat per-request keys.

    ``slo_class`` picks a configured class; ``ttft_slo_ms`` and ``tpot_slo_ms`` (milliseconds)
    then override single targets. Keys that are absent or None leave the default in force. Of a
    request that is resumed, the next token is due when TPOT says so: `RESUMED_KEY` times that
    after the first one.

    Args:
        extra_args: The request's free arguments, or None. Foreign keys are ignored, unless they
            are nearly ours.
        default: Targets when a request says nothing.
        classes: Name to targets.

    Raises:
        SloError: A key of ours has a wrong type or value, or names an unknown class, or a key is
            nearly one of ours.
    """
    if not extra_args:
        return default
    for key in extra_args:
        if (meant := meant_key(key)) and meant != key:
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
    _, num_resumed = history(extra_args)
    if num_resumed and tpot_s < math.inf:
        ttft_s = num_resumed * tpot_s
    if ttft_s == target.ttft_s and tpot_s == target.tpot_s:
        return target
    return SloTarget(ttft_s=ttft_s, tpot_s=tpot_s)


def history(extra_args: Mapping[str, Any] | None) -> tuple[float, int]:
    """What a request has behind it that a gateway sends again; nothing for any other.

    Returns:
        Seconds since it came, or since the first of its tokens was sent; and how many were.

    Raises:
        SloError: They are no time >= 0 and no count.
    """
    waited_ms = (extra_args or {}).get(WAITED_KEY) or 0.0
    if (
        isinstance(waited_ms, bool)
        or not isinstance(waited_ms, int | float)
        or not 0 <= waited_ms < math.inf
    ):
        raise SloError(f"'{WAITED_KEY}' must be milliseconds >= 0 (got {waited_ms!r}).")
    num_resumed = (extra_args or {}).get(RESUMED_KEY) or 0
    if isinstance(num_resumed, bool) or not isinstance(num_resumed, int) or num_resumed < 0:
        raise SloError(f"'{RESUMED_KEY}' must be a number of tokens >= 0 (got {num_resumed!r}).")
    return waited_ms / 1e3, num_resumed


def _milliseconds(extra_args: Mapping[str, Any], key: str, fallback_s: float) -> float:
    value = extra_args.get(key)
    if value is None:
        return fallback_s
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SloError(
            f"'{key}' must be a finite number of milliseconds > 0 (got {value!r}); "
            f"leave it out to use the server's default."
        )
    return float(value) / 1e3
