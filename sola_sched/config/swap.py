"""The operator's options for KV swapping, validated when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.config import rules
from sola_sched.errors import ConfigError

#: Name of the KV connector, as in ``--kv-transfer-config``.
CONNECTOR = "SolaKVSwapConnector"

#: Key of the connector's own configuration by which the plug-in says how many engines of the
#: server are on one host; no option.
NUM_ENGINES = "num_engines_on_host"

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
        rules.one_of("swap.mode", self.mode, MODES)
        rules.number(
            "swap.host_gib", self.host_gib, low=0.0, hint="use 0 to keep nothing on the host"
        )
        if self.group_tokens != WHOLE:
            hint = f"use {WHOLE!r} for one group a copy"
            rules.count("swap.group_tokens", self.group_tokens, hint)
        rules.count("swap.segment_tokens", self.segment_tokens)
        for name in ("ahead", "always"):
            rules.flag(f"swap.{name}", getattr(self, name))

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
        rules.known(cls, options, "swap")
        return cls(**options)
