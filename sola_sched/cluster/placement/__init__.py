"""Which instance gets a request: Aladdin's constraints, best fit, the optimum, and groups."""

from __future__ import annotations

from sola_sched.cluster.placement.best_fit import best_fit, least_pressed, pack, why_infeasible
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.exact import ExactPlacement, place_exactly
from sola_sched.cluster.placement.fleet import Fleet, Phase, Tightness
from sola_sched.cluster.placement.groups import GroupedFleet, group_sizes
from sola_sched.cluster.placement.sizing import instances_needed

__all__ = [
    "Demand",
    "ExactPlacement",
    "Fleet",
    "GroupedFleet",
    "Phase",
    "Tightness",
    "best_fit",
    "group_sizes",
    "instances_needed",
    "least_pressed",
    "pack",
    "place_exactly",
    "why_infeasible",
]
