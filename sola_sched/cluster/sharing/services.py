"""A service: one model with its own requests, rate and targets (SeaLLM, sections 2.1 and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError


@dataclass(frozen=True)
class Service:
    """What a provider knows of a service before it places it.

    Attributes:
        name: Unique among the services.
        model: What it runs.
        rate: Requests per second, the mean.
        lengths: Prompt and output tokens of past requests; what they look like.
        refused: Share of its requests whose prompts no engine takes; `lengths` are of the others.
        slo: TTFT and TPOT targets, seconds.
        slo_scale: Most end-to-end latency, in mean execution times of the service (Eq. 5); inf
            for none.
        engine: Arguments of `vllm serve` for its engines, by name; `model` among them where the
            weights are not the model's own.
    """

    name: str
    model: str
    rate: float
    lengths: Sequence[tuple[int, int]] = field(repr=False)
    slo: SloTarget = field(default_factory=SloTarget)
    slo_scale: float = math.inf
    engine: Mapping[str, Any] = field(default_factory=dict, repr=False)
    refused: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("'name' of a service must not be empty (got ''); give it one.")
        for key in ("rate", "slo_scale"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"'{key}' of service {self.name!r} must be a number (got {value!r})."
                )
            if not value > 0.0 or (key == "rate" and math.isinf(value)):
                raise ConfigError(
                    f"'{key}' of service {self.name!r} must be a number > 0 (got {value!r}); "
                    + ("leave out a service without requests." if key == "rate" else "correct it.")
                )
        if not self.lengths:
            raise ConfigError(
                f"'lengths' of service {self.name!r} must hold at least one request (got none); "
                "give prompt and output tokens of past requests."
            )
        for pair in self.lengths:
            if len(tuple(pair)) != 2 or not all(1 <= n < math.inf for n in pair):
                raise ConfigError(
                    f"'lengths' of service {self.name!r} must be pairs of prompt and output "
                    f"tokens, each >= 1 (got {pair!r}); correct them."
                )

    @property
    def longest(self) -> int:
        """Tokens of its longest request, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths)


def by_name(services: Iterable[Service]) -> dict[str, Service]:
    """The services by name.

    Raises:
        ConfigError: There is none, or two have the same name.
    """
    named: dict[str, Service] = {}
    for service in services:
        if service.name in named:
            raise ConfigError(
                f"'name' of a service must be unique (got {service.name!r} twice); rename one."
            )
        named[service.name] = service
    if not named:
        raise ConfigError("There must be at least one service (got none); name one.")
    return named
