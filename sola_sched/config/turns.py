"""The operator's options for turns on a GPU that several engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.config import rules
from sola_sched.errors import ConfigError


@dataclass(frozen=True)
class TurnsConfig:
    """How this engine shares its GPU with others; see `docs/sharing.md`.

    Attributes:
        group: Name of the group, the same for all engines on the GPU, or the path of a folder that
            all of them see.
        share: Share of the GPU's time that this engine gets at least while it has work, in [0, 1).
            The shares of a group sum up to at most 1. What they leave goes by need.
        limit_s: Seconds after which a turn ends although its holder still has it, > 0. Longer than
            the longest step.
    """

    group: str
    share: float = 0.1
    limit_s: float = 2.0

    def __post_init__(self) -> None:
        group: Any = self.group
        if not isinstance(group, str) or not group.strip() or "\0" in group:
            raise ConfigError(
                f"'turns.group' must be a name or a path (got {group!r}); give all engines "
                "on one GPU the same."
            )
        rules.number("turns.share", self.share, low=0.0, high=1.0, high_open=True)
        rules.number("turns.limit_s", self.limit_s, low=0.0, low_open=True)

    @classmethod
    def from_mapping(cls, options: Any) -> TurnsConfig:
        """Build the options from plain data.

        Raises:
            ConfigError: An option is unknown, missing or breaks its rule.
        """
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping) or "group" not in options:
            raise ConfigError(
                f"'turns' must be an object with 'group' (got {options!r}); "
                'e.g. {"group": "gpu0", "share": 0.1}.'
            )
        rules.known(cls, options, "turns")
        return cls(**options)
