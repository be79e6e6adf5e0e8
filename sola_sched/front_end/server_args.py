"""The arguments of vLLM's server, where a front end of ours adds to them."""

from __future__ import annotations

from typing import Any


def add_middleware(args: Any, name: str) -> None:
    """Add a middleware once, behind those that are there.

    Args:
        args: The server's arguments; nothing is done to those of anything else.
        name: Dotted name of its class.
    """
    middleware = getattr(args, "middleware", None)
    if isinstance(middleware, list) and name not in middleware:
        args.middleware = [*middleware, name]
