"""What waiting requests would find in the prefix cache, looked up as far as there is time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import WAITING, BoolArray, IntArray, StepState
from sola_sched.vllm_adapter.versions import Seams

#: Waiting requests that are looked up at a step, at most.
_LOOKUPS_PER_STEP = 4
#: A look-up takes time for each block that it walks over, up to a microsecond or two. It may be so
#: many at a step on average, arrivals included; after a longer look-up the next ones wait.
BLOCKS_PER_STEP = 256
#: Answers that are kept for requests that wait for their first look-up.
_NUM_ANSWERS = 8


class PrefixLookups:
    """Bounds what look-ups take: a request is looked up when it comes, or soon after, and in turn.

    With full attention a look-up walks over the blocks that it finds, else perhaps over all of the
    prompt's, although it finds none. Prompts that another engine sends are not looked up.

    Until its first look-up a request is expected to find what others with the same prefix have
    found, which the hash of the last block tells at once.

    Args:
        seams: Looks up.
        block_size: Tokens.
    """

    def __init__(self, seams: Seams, block_size: int) -> None:
        self._seams, self._block_size = seams, block_size
        self._walks_all = seams.walks_all_blocks
        self._debt = 0  # blocks walked over lately beyond what steps allow
        self._next = 0
        self._unknown: dict[str, None] = {}  # requests without a look-up, the oldest first
        # Of the last that came those that were looked up: until the next step nothing changes.
        self._fresh: deque[str] = deque(maxlen=_LOOKUPS_PER_STEP)
        self._answers: deque[tuple[int, Any]] = deque(maxlen=_NUM_ANSWERS)

    def arrived(self, request: Any) -> int:
        """Tokens that a new request is expected to find."""
        if awaited := self._seams.num_awaited_tokens(request):
            return awaited
        if self._debt < BLOCKS_PER_STEP:
            self._fresh.append(request.request_id)
            return self._look_up(request)
        self._unknown[request.request_id] = None
        prefix_of = self._seams.prefix_hash
        found = (num for num, prefix in self._answers if prefix_of(request, num) == prefix)
        return max(found, default=0)

    def ended(self, req_id: str) -> None:
        """A request is not there any more, whether or not steps were planned meanwhile."""
        self._unknown.pop(req_id, None)

    def step(self, waiting: IntArray, requests: Mapping[str, Any], monitor: StateMonitor) -> None:
        """Look up a few of those that wait: first those that have not been, then all in turn."""
        self.pass_step()
        fresh = {*self._fresh}
        self._fresh.clear()
        for _ in range(min(len(waiting), _LOOKUPS_PER_STEP)):
            if self._debt >= BLOCKS_PER_STEP:
                return
            row = self._first_unknown(monitor)
            if row is None:
                row = int(waiting[self._next % len(waiting)])
                self._next += 1
            name = monitor.table.req_id[row]
            assert name is not None, f"row {row} waits and has no request"
            if name in fresh:
                continue
            monitor.expect_cached(row, self._look_up(requests[name]))

    def pass_step(self) -> None:
        """A step passes: what look-ups have walked over beyond what steps allow is less by that."""
        self._debt = max(0, self._debt - BLOCKS_PER_STEP)

    def without_unknown(self, state: StepState, rows: IntArray) -> IntArray:
        """Those of `rows` to refuse: who has not been looked up may be in time after all."""
        if not self._unknown:
            return rows
        req_id = state.table.req_id
        is_known = np.array([req_id[row] not in self._unknown for row in rows], dtype=bool)
        return known_or_late(state, rows, is_known)

    def _look_up(self, request: Any) -> int:
        if awaited := self._seams.num_awaited_tokens(request):
            return awaited
        num_tokens = self._seams.num_cached_tokens(request)
        self._debt += num_tokens // self._block_size
        if self._walks_all:
            self._debt += len(request.block_hashes)
        if num_tokens:
            answer = (num_tokens, self._seams.prefix_hash(request, num_tokens))
            if answer not in self._answers:
                self._answers.append(answer)
        return num_tokens

    def _first_unknown(self, monitor: StateMonitor) -> int | None:
        """The row of the oldest that waits for its first look-up."""
        table = monitor.table
        while self._unknown:
            name = next(iter(self._unknown))
            del self._unknown[name]
            row = table.row_of.get(name)
            if row is not None and table.phase[row] == WAITING:
                return row
        return None


def known_or_late(state: StepState, rows: IntArray, is_known: BoolArray | bool) -> IntArray:
    """Those of `rows` of whom it is known what they lack, or whose first token is overdue."""
    chosen: IntArray = rows[is_known | (state.table.due_s[rows] <= state.now_s)]
    return chosen
