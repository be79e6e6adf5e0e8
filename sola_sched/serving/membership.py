"""Which replicas of a deployment there are, from a process' Ray routers to its gateway.

A module of its own: Ray sends a router's class to its processes by value, with copies of the
variables of the module that it is from. What it reads of another module is the process' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

#: Called with the `key` of a deployment and its replicas, names to URLs, from any thread, whenever
#: they change. Where there is one, this process' routers leave following the replicas to it.
listeners: list[Callable[[str, Mapping[str, str]], None]] = []


def key(application: str, deployment: str) -> str:
    """What tells a deployment from those of other applications."""
    return f"{application}#{deployment}"
