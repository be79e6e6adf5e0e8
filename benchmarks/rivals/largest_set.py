"""The largest set of prompts that can all be computed in time, and that memory holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray


def largest_set(
    gaps_s: FloatArray, need: IntArray, forced: BoolArray, speeds: Sequence[float]
) -> list[int]:
    """Places of the largest set of prompts that are all in time, in order of deadlines.

    Args:
        gaps_s: Time from each one's deadline back to the one before, the first to now.
        need: Tokens of each.
        forced: Those that are in the set, also where they are late with any.
        speeds: Tokens per second with 0, 1, ... of them admitted.
    """
    best = np.array([0.0])
    takes = []
    for gap_s, tokens, is_forced in zip(gaps_s, need, forced, strict=True):
        spare = best + (gap_s * np.array(speeds[: len(best)]) if gap_s else 0.0)
        left_out, taken = np.append(spare, -np.inf), np.append(-np.inf, spare - tokens)
        if is_forced:
            left_out[:] = -np.inf
        if not is_forced or (taken >= 0.0).any():
            taken[taken < 0.0] = -np.inf
        takes.append(taken > left_out)
        best = np.maximum(left_out, taken)
    count = int(np.flatnonzero(best > -np.inf)[-1])
    chosen = []
    for place in reversed(range(len(takes))):
        if takes[place][count]:
            chosen.append(place)
            count -= 1
    return chosen[::-1]


def those_that_fit(need: FloatArray, forced: BoolArray, room: float) -> BoolArray:
    """Who stays so that the sum of needs is within the room; the largest of the others go first."""
    stays = np.ones(len(need), dtype=bool)
    for place in np.argsort(-need, kind="stable").tolist():
        if need[stays].sum() <= room:
            break
        stays[place] = forced[place]
    return stays
