"""Routers by the names that the command line and configurations use."""

from __future__ import annotations

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.view import Router
from sola_sched.errors import ConfigError

NAMES = tuple(sorted(ALL_ROUTERS))
DEFAULT = "least-ttft"


def make_router(name: str, seed: int = 0) -> Router:
    """The router of this name.

    Args:
        seed: Of its random choices.

    Raises:
        ConfigError: There is none.
    """
    if name not in ALL_ROUTERS:
        raise ConfigError(f"'router' must be one of {', '.join(NAMES)} (got {name!r}).")
    return ALL_ROUTERS[name](seed)
