"""What became of each request, and what it waited for: always on, bounded in memory.

While requests wait, the engine is short of the same thing for all of them. So one total of seconds
is kept for each shortage. A request notes the totals when it begins to wait and takes the
difference when it starts: a step costs the same however many wait.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sola_sched.compiled.functions import Records
from sola_sched.core.state import StepPlan, StepState
from sola_sched.core.table import WAITING, RequestTable, RequestValues
from sola_sched.cost.model import CostModel
from sola_sched.prediction.length import LEVELS

#: What those that wait lack: a slot; KV blocks; or time in a step, which others have.
SHORTAGES = SLOTS, MEMORY, TIME = 0, 1, 2
_NOTHING = -1

#: How a request ends.
ENDS = ("attained", "missed", "rejected", "failed", "aborted")

#: What is kept of a request that has ended. Times are seconds on the monitor's clock, NaN where
#: there is none; targets are inf where there is none.
#:
#: - started_s: when it first got a slot.
#: - waited_s: time without a slot, by shortage.
#: - held_s, num_held: time and steps that it sat out although it had a slot.
#: - lost_s, need_s: when the policy first found that it would miss a target, and what it needed
#:   then at least.
#: - alone_s, alone_step_s: what its prompt, and one of its decodes, take by themselves.
#: - num_chunks: steps that computed a part of its prompt.
#: - predicted: output tokens that were predicted, -1 without a prediction.
#: - num_running, num_before: at its arrival, requests with a slot, and requests that waited.
#: - num_overtook: that came later, and started while it waited.
#: - end: place in `ENDS`.
_TIMES = (
    "arrival_s", "started_s", "first_token_s", "last_token_s", "ended_s", "ttft_s", "tpot_s",
    "e2e_s", "held_s", "lost_s", "need_s", "alone_s", "alone_step_s",
)  # fmt: skip
_COUNTS = (
    "num_prompt", "num_output", "predicted", "num_chunks", "num_preemptions", "num_held",
    "num_running", "num_before", "num_overtook", "priority", "end",
)  # fmt: skip
FATE = np.dtype(
    [(name, np.float64) for name in _TIMES]
    + [(name, np.int64) for name in _COUNTS]
    + [("waited_s", np.float64, len(SHORTAGES))]
)


@dataclass(slots=True)
class _Note:
    """What is noted of a request that lives; plain numbers, which cost least to change."""

    num_running: int
    num_before: int
    began_s: tuple[float, ...] | None  # the totals when it began to wait; None if it does not
    waited_s: tuple[float, ...] = (0.0,) * len(SHORTAGES)
    started_s: float = math.nan
    held_s: float = 0.0
    sits_out_s: float = math.nan  # since when, in this step
    num_held: int = 0
    num_chunks: int = 0


_NUM_STARTS = 4096
#: Characters of an id that are kept, and of these those of a hash.
_MOST_OF_ID, _NUM_HASHED = 256, 16


def shown_id(req_id: str) -> str:
    """An id as it is kept and shown: a client may choose one of any length and characters.

    One that is too long, or does not print on one line, ends in a hash of the whole of it.
    """
    if len(req_id) <= _MOST_OF_ID and req_id.isprintable():
        return req_id
    digest = hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()
    begin = printable(req_id[: _MOST_OF_ID - _NUM_HASHED - 1])
    return f"{begin}~{digest[:_NUM_HASHED]}"


def printable(text: str) -> str:
    """A text on one line, with a question mark for each character that does not print."""
    return "".join(each if each.isprintable() else "?" for each in text)


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests that have ended, in the order of their ends.

    Attributes:
        req_ids, slo_classes: Of each; ids as in `shown_id`.
        records: `FATE`, [n].
    """

    req_ids: list[str]
    slo_classes: list[str]
    records: Records


class Fates:
    """Notes what happens to each request of a table, and keeps those that have ended.

    Args:
        most: So many of those that have ended last are kept.
    """

    def __init__(self, most: int = 1024) -> None:
        self._notes: dict[int, _Note] = {}  # by row
        self._total_s = (0.0,) * len(SHORTAGES)
        self._shortage, self._since_s = _NOTHING, math.nan
        self._held: list[_Note] = []  # of those that sit this step out
        self._starts = np.full((_NUM_STARTS, 2), math.nan)  # when, and the arrival
        self._num_starts = 0
        self.most = most
        self._ended: deque[tuple[str, str, tuple[object, ...]]] = deque(maxlen=most)
        self.num_ended = 0

    def arrived(self, table: RequestTable, row: int, now_s: float) -> None:
        """A request has been added to the table."""
        self._advance(now_s)
        num_waiting = table.num_in_phase[WAITING]
        self._notes[row] = _Note(len(table) - num_waiting, num_waiting - 1, self._total_s)

    def started(self, table: RequestTable, row: int, now_s: float) -> None:
        """A request that waited has a slot."""
        self._advance(now_s)
        note = self._notes[row]
        self._end_wait(note)
        if note.started_s != note.started_s:  # NaN: for the first time
            note.started_s = now_s
            self._starts[self._num_starts % _NUM_STARTS] = now_s, table.arrival_s[row]
            self._num_starts += 1

    def preempted(self, row: int, now_s: float) -> None:
        """A request has lost its slot, and waits."""
        self._advance(now_s)
        self._notes[row].began_s = self._total_s

    def parked(self, row: int, now_s: float) -> None:
        """A request waits for something of its own, until it is `preempted` or `started`."""
        self._advance(now_s)
        self._end_wait(self._notes[row])

    def computed(self, rows: Iterable[int]) -> None:
        """A step computes a part of each of these prompts."""
        for row in rows:
            self._notes[row].num_chunks += 1

    def planned(self, state: StepState, plan: StepPlan, now_s: float) -> None:
        """A step is planned so: until the next plan those that wait lack what they lack now."""
        self._advance(now_s)
        self._shortage = _shortage(state, plan) if len(state.waiting) else _NOTHING
        self.end_holds(now_s)
        if plan.run is not None and len(plan.run) + len(plan.preempt) < len(state.running):
            takes_part = {*plan.run.tolist(), *plan.preempt.tolist()}
            self._held = [
                self._notes[row] for row in state.running.tolist() if row not in takes_part
            ]
            for note in self._held:
                note.num_held += 1
                note.sits_out_s = now_s

    def end_holds(self, now_s: float) -> None:
        """Whoever sat out the step before takes part in the one that begins, unless it is told."""
        for note in self._held:
            note.held_s += now_s - note.sits_out_s
            note.sits_out_s = math.nan
        self._held = []

    def _advance(self, now_s: float) -> None:
        place = self._shortage
        if place != _NOTHING:
            total_s, passed_s = self._total_s, max(0.0, now_s - self._since_s)
            self._total_s = (*total_s[:place], total_s[place] + passed_s, *total_s[place + 1 :])
        self._since_s = now_s

    def _end_wait(self, note: _Note) -> None:
        if note.began_s is not None:
            (slots, memory, time), (slots0, memory0, time0) = self._total_s, note.began_s
            before = note.waited_s
            note.waited_s = (
                before[SLOTS] + slots - slots0,
                before[MEMORY] + memory - memory0,
                before[TIME] + time - time0,
            )
            note.began_s = None

    def ended(
        self,
        req_id: str,
        row: int,
        request: RequestValues,
        slo_class: str,
        end: str,
        now_s: float,
    ) -> None:
        """A request that is still in the table has ended.

        Args:
            request: What the table has of it.
            end: One of `ENDS`.
            The rest: as in `StateMonitor`.
        """
        note = self._notes.pop(row)
        if note.began_s is not None:
            self._advance(now_s)
            self._end_wait(note)
        held_s = note.held_s
        if note.sits_out_s == note.sits_out_s:
            held_s += now_s - note.sits_out_s
        predicted, num_overtook = -1, 0
        if not math.isnan(request.predicted[0]):
            predicted = round(float(np.interp(0.5, LEVELS, request.predicted)))
        if end != "attained":
            until_s = now_s if math.isnan(note.started_s) else note.started_s
            num_overtook = self._num_overtook(request.arrival_s, until_s)
        self.num_ended += 1
        fate = (
            request.arrival_s, note.started_s, request.first_token_s, request.last_token_s, now_s,
            request.ttft_s, request.tpot_s, request.e2e_s, held_s, request.lost_s, request.need_s,
            math.nan, math.nan, request.num_prompt, request.num_output, predicted,
            note.num_chunks, request.num_preemptions, note.num_held, note.num_running,
            note.num_before, num_overtook, request.priority, ENDS.index(end), note.waited_s,
        )  # fmt: skip
        self._ended.append((shown_id(req_id), slo_class, fate))

    def _num_overtook(self, arrival_s: float, until_s: float) -> int:
        """Of the latest starts those, until then, of requests that came after such an arrival."""
        start_s, came_s = self._starts[:, 0], self._starts[:, 1]
        return int(np.count_nonzero((came_s > arrival_s) & (start_s < until_s)))

    def since(self, number: int, cost: CostModel) -> Ended:
        """Those that are kept of all that ended after so many.

        Args:
            cost: Says what each would have taken by itself.
        """
        count = min(self.num_ended - number, len(self._ended))
        latest = list(islice(reversed(self._ended), max(0, count)))[::-1]
        records = np.array([fate for _, _, fate in latest], FATE)
        records["alone_s"] = cost.prefill_s(records["num_prompt"])
        records["alone_step_s"] = cost.decode_s(1.0, records["num_prompt"])
        return Ended([name for name, _, _ in latest], [each for _, each, _ in latest], records)


def _shortage(state: StepState, plan: StepPlan) -> int:
    """What those lack that still wait when this plan is carried out."""
    num_admitted = 0 if plan.admit is None else len(plan.admit)
    if len(state.running) - len(plan.preempt) + num_admitted >= state.max_num_running:
        return SLOTS
    if num_admitted == 0:
        need = int(state.table.prefill_target[state.waiting].min())
        if need > state.num_free_blocks * state.block_size:
            return MEMORY
    return TIME
