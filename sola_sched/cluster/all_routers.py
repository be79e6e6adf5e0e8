"""Every router by its name on the command line, the simple ones and those that place."""

from __future__ import annotations

from collections.abc import Callable

from sola_sched.cluster.placement.expected import CombinedRouter
from sola_sched.cluster.placement.router import PackingRouter, SpreadingRouter
from sola_sched.cluster.routers import ROUTERS
from sola_sched.cluster.unequal.mapper import WorkloadMapper
from sola_sched.cluster.view import Router

#: Name to a router made with a seed.
ALL_ROUTERS: dict[str, Callable[[int], Router]] = {
    **ROUTERS,
    "workload": lambda seed: WorkloadMapper(),
    "aladdin": lambda seed: PackingRouter(),
    "packing": lambda seed: PackingRouter(is_relative=True, is_chunked=True, skips_lost=True),
    "spreading": lambda seed: SpreadingRouter(),
    "combined": CombinedRouter,
}
