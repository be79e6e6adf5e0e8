"""Aladdin's Algorithm 1: best fit by capacity norm.

Source: Aladdin, section 4.2. Instances are tried from the fullest on; the first that breaks no
constraint gets the request; if none does, an unused one is opened. capacity_norm is the L2 norm of
the number of requests and of sum (l_in + gamma l_out). An unused instance has the norm 0, so it is
tried last: opening one needs no step of its own.

For unequal instances the norm counts shares of what each instance allows: 40 requests are many on
one GPU and few on another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.fleet import Fleet
from sola_sched.cluster.ties import Turns
from sola_sched.errors import InfeasibleError

FloatArray = NDArray[np.float64]
_LEAST_LIMIT = 1e-9
#: Shares of a limit that differ by no more are equal where instances are idle.
_PRESSURE_TIE = 0.01


def best_fit(
    fleet: Fleet, demand: Demand, *, is_relative: bool = False, turns: Turns | None = None
) -> int | None:
    """The fullest instance that can take the request within all constraints.

    Args:
        fleet: The instances; it stays as it is.
        demand: The request.
        is_relative: Rank by shares of each instance's limits with the request, for unequal ones.
        turns: Takes equals in turn; None for the first of them.

    Returns:
        The instance; None if none is feasible. Some 20 numpy operations on
        columns of the fleet, and one exact check of KV memory for each instance where it is tight.
    """
    ok = fleet.feasible(demand)
    if is_relative:
        shares = _shares(fleet, demand)
        norm = np.sqrt(np.einsum("ij,ij->j", shares, shares))
    else:
        norm = np.hypot(fleet.num_requests, fleet.context)
    norm[~ok] = -1.0
    while True:
        i = int(norm.argmax())
        if norm[i] < 0.0:
            return None
        if turns is not None:
            i = turns.next(np.flatnonzero(norm == norm[i]).tolist())
        if fleet.kv_fits(i, demand):
            return i
        norm[i] = -1.0


def least_pressed(fleet: Fleet, demand: Demand, *, turns: Turns | None = None) -> int | None:
    """The instance whose constraint nearest to its limit is the farthest from it.

    Where none is feasible that is the one whose worst constraint is broken by the least factor.

    Args:
        fleet: The instances; it stays as it is.
        demand: The request.
        turns: Takes equals in turn; None for the first of them.

    Returns:
        The instance, of equals the one with the fewest requests; None if none is open.
    """
    pressure = _pressure(fleet, demand)
    if not fleet.is_open.any():
        return None
    if turns is None:
        return int(np.lexsort((fleet.num_requests, pressure))[0])
    (is_open,) = fleet.is_open.nonzero()
    return turns.least(
        is_open.tolist(), pressure[is_open].tolist(), lambda i: float(fleet.num_requests[i]),
        slack=_PRESSURE_TIE,
    )  # fmt: skip


def why_infeasible(fleet: Fleet, demand: Demand) -> str:
    """Which constraint fails on the instance that comes nearest, and by how much."""
    if not fleet.is_open.any():
        return f"none of {len(fleet)} instances takes requests"
    i = int(_pressure(fleet, demand).argmin())
    broken = fleet.broken(i, demand) or ["nothing"]
    return f"on the nearest, {fleet.models[i].name} (number {i}), {' and '.join(broken)}"


def pack(fleet: Fleet, demands: Sequence[Demand], *, is_relative: bool = False) -> list[int]:
    """Place requests one after the other by best fit; the fleet takes them.

    Returns:
        The instance of each request.

    Raises:
        InfeasibleError: A request fits nowhere; the message says which constraint fails and by
            how much.
    """
    placed = []
    for number, demand in enumerate(demands):
        i = best_fit(fleet, demand, is_relative=is_relative)
        if i is None:
            raise InfeasibleError(
                f"Request {number} ({demand.prompt_tokens} prompt tokens) fits on none of "
                f"{len(fleet)} instances: {why_infeasible(fleet, demand)}."
            )
        fleet.add(i, demand)
        placed.append(i)
    return placed


def _shares(fleet: Fleet, demand: Demand) -> FloatArray:
    use, limit = fleet.load_with(demand)
    shares: FloatArray = use / np.maximum(limit, _LEAST_LIMIT)
    return shares


def _pressure(fleet: Fleet, demand: Demand) -> FloatArray:
    pressure: FloatArray = _shares(fleet, demand).max(axis=0)
    pressure[~fleet.is_open] = np.inf
    return pressure
