"""Which prefills can still meet their deadlines, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from sola_sched.state import FloatArray, IntArray

#: Requests looked at one by one when not all deadlines can be met; the later ones follow by cost.
_MAX_EXAMINED = 64


def on_time_first(
    service_s: FloatArray,
    deadline_s: FloatArray,
    weigh: Callable[[], FloatArray],
    rank: IntArray | None,
) -> tuple[IntArray, int]:
    """Order jobs so that as many as possible end before their deadlines.

    Source: the algorithm of Moore and Hodgson (1968) for the fewest late jobs on one machine:
    take the jobs by deadline and, whenever the last one taken would be late, give up the job
    that costs most. Departure: the job given up is the one with the largest weight (prefill plus
    remaining decode), which frees more of the accelerator than the longest prefill alone.

    Args:
        service_s: Time of the accelerator that each job needs, shape [n], >= 0.
        deadline_s: Latest end of each job, counted from now, shape [n].
        weigh: Returns the costs that decide which job is given up, shape [n]; called only when
            some job is late.
        rank: Priority class of each job, smaller first and strictly before; None for one class.

    Returns:
        (order, num_on_time): indices of all jobs; the first `num_on_time` are expected on time,
        by (class, deadline); the others follow by cost.
    """
    if rank is None:
        order = np.argsort(deadline_s, kind="stable")
    else:
        order = np.lexsort((deadline_s, rank))
    if not len(order):
        return order, 0
    ends = np.cumsum(service_s[order])
    if (ends <= deadline_s[order]).all():
        return order, len(order)
    weight_s = weigh()
    if rank is not None and rank.any() and rank.min() != rank.max():
        return _by_class(order, service_s, deadline_s, weight_s, rank)
    kept, dropped = _moore_hodgson(order, 0.0, service_s, deadline_s, weight_s)
    return np.asarray(kept + dropped, dtype=np.int64), len(kept)


def _by_class(
    order: IntArray,
    service_s: FloatArray,
    deadline_s: FloatArray,
    weight_s: FloatArray,
    rank: IntArray,
) -> tuple[IntArray, int]:
    """Higher classes choose first; what they keep delays the lower ones."""
    kept: list[int] = []
    dropped: list[int] = []
    busy_s = 0.0
    for value in np.unique(rank):
        members = order[rank[order] == value]
        keep, drop = _moore_hodgson(members, busy_s, service_s, deadline_s, weight_s)
        busy_s += float(service_s[keep].sum())
        kept += keep
        dropped += drop
    return np.asarray(kept + dropped, dtype=np.int64), len(kept)


def _moore_hodgson(
    order: IntArray,
    busy_s: float,
    service_s: FloatArray,
    deadline_s: FloatArray,
    weight_s: FloatArray,
) -> tuple[list[int], list[int]]:
    head, tail = order[:_MAX_EXAMINED], order[_MAX_EXAMINED:]
    costliest: list[tuple[float, int, float]] = []
    given_up: set[int] = set()
    jobs = zip(
        head.tolist(),
        service_s[head].tolist(),
        deadline_s[head].tolist(),
        weight_s[head].tolist(),
        strict=True,
    )
    for job, service, deadline, weight in jobs:
        heapq.heappush(costliest, (-weight, job, service))
        busy_s += service
        while busy_s > deadline and costliest:
            _, worst, freed = heapq.heappop(costliest)
            given_up.add(worst)
            busy_s -= freed
    kept = [job for job in head.tolist() if job not in given_up]
    late = np.concatenate([np.fromiter(given_up, dtype=np.int64), tail])
    dropped = late[np.argsort(weight_s[late], kind="stable")]
    return kept, dropped.tolist()
