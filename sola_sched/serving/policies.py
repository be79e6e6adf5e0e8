"""Routers by the names that the command line and configurations use."""

from __future__ import annotations

from sola_sched.cluster.placement.router import PackingRouter
from sola_sched.cluster.routers import ROUTERS
from sola_sched.cluster.view import Router
from sola_sched.errors import ConfigError

NAMES = (*sorted(ROUTERS), "packing")
DEFAULT = "least-ttft"


def make_router(name: str, seed: int = 0) -> Router:
    """The router of this name.

    Args:
        seed: Of its random choices.

    Raises:
        ConfigError: There is none.
    """
    if name == "packing":
        return PackingRouter(is_relative=True, is_chunked=True)
    if name not in ROUTERS:
        raise ConfigError(f"'router' must be one of {', '.join(NAMES)} (got {name!r}).")
    return ROUTERS[name](seed)
