"""Who gets in: the chunk that fits the step, and slots and memory for those who start in it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import IntArray
from sola_sched.planner.attain.lost import Judged
from sola_sched.planner.attain.pace import Pace
from sola_sched.planner.base import num_that_fit

#: Tokens and times are turned into each other and back.
_ROUNDING = 1.0 + 1e-6


@dataclass(frozen=True, slots=True)
class Entry:
    """The prefills of the step.

    Attributes:
        served: Their places, in the order of service.
        offered: Waiting ones beyond the chunk, in case a prefix cache leaves budget over.
        tokens: Of the chunk.
        has_backlog: Whether some that can be on time must wait for a later step.
    """

    served: IntArray
    offered: IntArray
    tokens: int
    has_backlog: bool


def let_in(judged: Judged, pace: Pace, *, is_blocked: bool) -> Entry:
    """The first of `pace.order` that the step has time for and that find slots and memory.

    Args:
        judged: The requests.
        pace: The step.
        is_blocked: Whether nobody may start for the time being.
    """
    order, tuning = pace.order, judged.tuning
    may = admissible(judged, order[: tuning.num_examined], is_blocked=is_blocked)
    if judged.state.chunks_prefills:
        served, tokens, is_cut = _first_that_fit(judged, may, pace.limit_s)
    else:
        (served, tokens), is_cut = _whole(judged, may, pace.limit_s), False
    has_backlog = is_cut or len(served) < len(order)
    offered, first = may[:0], judged.prefills.num_started
    # Budget is left over if those served hit a cache, not if they have begun.
    if judged.state.chunks_prefills and (served >= first).any():
        offered = may[len(served) : len(served) + tuning.num_spare_offers]
        offered = offered[offered >= first]
    return Entry(served, offered, tokens, has_backlog)


def tokens_in(
    judged: Judged, limit_s: float, room: int, has: float, ends: Sequence[float] = ()
) -> int:
    """Tokens of a chunk, at most `room`, beside the decodes on course in a step of `limit_s`.

    Args:
        judged: The requests.
        limit_s: Time for the step, seconds.
        room: Tokens.
        has: Tokens that the request has computed.
        ends: Where whole prompts end, tokens, ascending: a chunk that ends there is not rounded
            down further.
    """
    if room <= 0 or math.isinf(limit_s):
        return max(0, room)
    tokens = _most_tokens(judged, limit_s, has)
    tuning = judged.tuning
    step = judged.tile if tokens >= tuning.many_tiles * judged.tile else tuning.sub_tile
    rounded = tokens // step * step
    num_whole = bisect.bisect_right(ends, tokens * _ROUNDING)
    if num_whole:
        rounded = max(rounded, ends[num_whole - 1])
    return int(min(room, rounded))


def _most_tokens(judged: Judged, limit_s: float, has: float) -> float:
    """Tokens of a prompt beside the decodes on course for which `limit_s` is enough time."""
    decodes = judged.decodes
    return judged.state.cost.max_prefill_tokens(
        limit_s, decodes.num_alive, int(decodes.ctx_alive), has
    )


def _first_that_fit(judged: Judged, order: IntArray, limit_s: float) -> tuple[IntArray, int, bool]:
    """The first of `order` that a step of `limit_s` has time for, their tokens in it, and whether
    one of them needs more."""
    if not len(order):
        return order, 0, False
    prefills, room = judged.prefills, judged.token_room
    ends = list(itertools.accumulate(prefills.chunk[order].tolist()))
    tokens = tokens_in(judged, limit_s, room, float(prefills.has[order[0]]), ends)
    if not tokens:
        return order[:0], 0, False
    last = min(len(order) - 1, bisect.bisect_left(ends, tokens))
    served = order[: last + 1]
    is_cut = tokens < ends[last] or bool((prefills.chunk[served] < prefills.new[served]).any())
    return served, int(min(tokens, ends[last])), is_cut


def _whole(judged: Judged, order: IntArray, limit_s: float) -> tuple[IntArray, int]:
    """Of `order` those that go whole into a step of `limit_s`, and their tokens.

    One that is too long is in nobody's way. The most urgent one goes alone, in a longer step,
    once all decodes can make up for that by their predicted ends.
    """
    if not len(order):
        return order, 0
    prefills, decodes = judged.prefills, judged.decodes
    first, room = int(order[0]), float(judged.token_room)
    if not math.isinf(limit_s):
        room = min(room, _most_tokens(judged, limit_s, float(prefills.has[first])) * _ROUNDING)
    taken = []
    for place in order.tolist():
        if prefills.chunk[place] <= room:
            taken.append(place)
            room -= prefills.chunk[place]
    if taken[:1] != [first]:
        need_s = judged.mixed_s + float(prefills.service_s[first])
        if need_s <= decodes.most_lent_s():
            taken = [first]
    return np.array(taken, dtype=np.int64), int(prefills.chunk[taken].sum())


# Slots and memory ---------------------------------------------------------------------------


def admissible(judged: Judged, candidates: IntArray, *, is_blocked: bool) -> IntArray:
    """Those that have begun, and the first waiting ones that find slots and memory."""
    state, num_started = judged.state, judged.prefills.num_started
    waiting = [place for place in candidates.tolist() if place >= num_started]
    if not waiting:
        return candidates
    count = 0
    if state.has_ranks or not is_blocked:
        count = max(0, min(len(waiting), judged.num_open_slots))
        count = _num_with_memory(judged, waiting[:count])
    if count == len(waiting):
        return candidates
    out = set(waiting[count:])
    left: IntArray = candidates[[place not in out for place in candidates.tolist()]]
    return left


def _num_with_memory(judged: Judged, waiting: list[int]) -> int:
    """How many of `waiting` may start before the predicted peak of KV memory is too high."""
    state, decodes, prefills = judged.state, judged.decodes, judged.prefills
    need = sum(float(prefills.size[place]) for place in waiting) / state.block_size
    used = 1.0 - (state.num_free_blocks - need) / max(1, state.num_blocks)
    if not len(waiting) or used <= judged.tuning.memory_threshold:
        return len(waiting)
    alive, started = decodes.alive, prefills.rows[: prefills.num_started]
    growing = np.concatenate([decodes.rows[alive], started])
    ahead = np.zeros(len(growing) + len(waiting), dtype=np.int64)
    ahead[: len(alive)] = decodes.ahead[alive]
    rows = np.concatenate([growing, prefills.rows[waiting]])
    most = state.table.num_prompt[rows] + state.table.num_output[rows] + ahead
    most = most + state.most_remaining(rows, ahead)
    capacity = judged.tuning.planned_memory * state.num_blocks * state.block_size
    if most.sum() < capacity:  # all of it at once: no peak is higher
        return len(waiting)
    left = state.likely_remaining(rows, ahead)
    places = np.array(waiting) - prefills.num_started
    return num_that_fit(state, growing, places, left, ahead, share=judged.tuning.planned_memory)
