"""The operator's options for KV swapping, validated when they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.errors import ConfigError

#: Name of the KV connector, as in ``--kv-transfer-config``.
CONNECTOR = "SolaKVSwapConnector"

MODES = ("auto", "raw", "int8", "off")

#: `group_tokens` that makes one group of all tokens of a copied piece.
WHOLE = "whole"


@dataclass(frozen=True)
class SwapConfig:
    """What happens to the KV of a request that loses its place on the accelerator.

    Attributes:
        mode: ``auto`` is ``raw`` on devices where swapped requests have been shown to keep their
            tokens, the CPU build of vLLM so far, and ``off`` elsewhere. ``raw`` copies the bytes
            as they are: the tokens of a swapped request are those it would have had. ``int8``
            quantizes them, half the bytes of bf16, and may change tokens. ``off`` computes
            preempted requests again, as vLLM does.
        host_gib: Host memory for swapped KV, GiB per worker process; page-locked on CUDA, taken
            at start. 0 keeps nothing, every preempted request is computed again.
        group_tokens: Tokens that share one scale and offset per channel in ``int8`` mode, >= 1,
            or ``whole`` for one per copied piece (up to `segment_tokens` tokens).
        segment_tokens: Most tokens in one copy, >= 1; rounded up to whole blocks. A worker keeps
            two staging buffers of this size on the accelerator.
        ahead: Whether copies run ahead of need: out, of the requests that will wait longest while
            free blocks run short, and in, of those that run next.
        always: Swap whatever the copy costs. Otherwise a context whose computation delays the
            requests less than its copy, by the step-time model and the measured copies, is
            computed again.
    """

    mode: str = "auto"
    host_gib: float = 4.0
    group_tokens: int | str = 64
    segment_tokens: int = 256
    ahead: bool = True
    always: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"'swap.mode' must be one of {', '.join(MODES)} (got {self.mode!r}).")
        _non_negative("host_gib", self.host_gib)
        if self.group_tokens != WHOLE:
            _positive("group_tokens", self.group_tokens, f"; use {WHOLE!r} for one group a copy")
        _positive("segment_tokens", self.segment_tokens)
        for name in ("ahead", "always"):
            if getattr(self, name) not in (True, False):
                raise ConfigError(
                    f"'swap.{name}' must be true or false (got {getattr(self, name)!r})."
                )

    @property
    def is_exact(self) -> bool:
        """Whether a request's tokens do not depend on its having been swapped."""
        return self.mode != "int8"

    @property
    def group_length(self) -> int | None:
        """`group_tokens` as the kernels take it: None for whole pieces."""
        return None if isinstance(self.group_tokens, str) else self.group_tokens

    @classmethod
    def from_mapping(cls, options: Any) -> SwapConfig:
        """Build the options from plain data.

        Raises:
            ConfigError: An option is unknown or breaks its rule.
        """
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"'swap' must be an object of options (got {options!r}); "
                'e.g. {"mode": "int8", "host_gib": 16}.'
            )
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(
                f"Unknown option{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(map(repr, unknown))} in 'swap'; known options: {', '.join(known)}."
            )
        return cls(**options)


def _non_negative(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ConfigError(
            f"'swap.{name}' must be a number >= 0 (got {value!r}); use 0 to keep nothing on the "
            "host."
        )


def _positive(name: str, value: Any, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"'swap.{name}' must be an integer >= 1 (got {value!r}){hint}.")
