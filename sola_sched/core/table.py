"""Per-request state in one struct of arrays.

A planner works on whole columns, and compiled functions on records, so that a step with hundreds of
requests costs microseconds, not a Python loop.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sola_sched.compiled.functions import FloatArray, IntArray, Records, for_types_of, records_of
from sola_sched.core import loops
from sola_sched.prediction.length import NUM_LEVELS, LengthPrediction

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)

#: Values of `RequestTable.phase`.
FREE, WAITING, PREFILL, DECODE, PARKED = 0, 1, 2, 3, 4
_NUM_PHASES = 5


class RequestValues(NamedTuple):
    """A record of `RequestTable`: its fields, in the order in which they are read, with defaults.

    The columns of the table say what they mean.
    """

    num_prompt: int = 0
    num_output: int = 0
    num_in_flight: int = 0
    max_tokens: int = 0
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    due_s: float = math.inf
    tpot_s: float = math.inf
    e2e_due_s: float = math.inf
    arrival_s: float = 0.0
    ttft_s: float = math.inf
    num_computed: int = 0
    prefill_target: int = 0
    weight: float = 1.0
    priority: int = 0
    service: int = 0
    length_class: int = 0
    phase: int = FREE
    serial: int = -1
    num_preemptions: int = 0
    e2e_s: float = math.inf
    queue_pos: int = 0
    ewt_s: float = math.nan
    served_by_s: float = math.inf
    lost_s: float = math.nan
    need_s: float = math.nan
    predicted: Any = (math.nan,) * NUM_LEVELS


_KINDS = {int: np.int64, float: np.float64, tuple: (np.float64, NUM_LEVELS)}
_SMALL = {"length_class": np.int32, "phase": np.int8}
#: The record of a request.
REQUEST = np.dtype(
    [
        (name, _SMALL.get(name, _KINDS[type(default)]))
        for name, default in RequestValues._field_defaults.items()
    ],
    align=True,
)


class RequestTable:
    """One record (`REQUEST`) per live request; rows are reused.

    Compiled functions take `records`. Python reads and writes columns, which are views of it, all
    of length `capacity` (`predicted` is [capacity, 10]):
        phase: FREE, WAITING (no KV on the accelerator), PREFILL, DECODE, or PARKED (out of the
            planner's hands, e.g. while a connector loads its KV). Written by `move`, and by
            `StepsInFlight` when a prefill ends.
        serial: Number of the request, counted from 0: tells two requests in one row apart.
        arrival_s: Arrival on the monitor's clock, seconds.
        ttft_s, tpot_s, e2e_s: Targets, seconds; ``inf`` means none.
        due_s: When the first token is due: ``arrival_s + ttft_s``.
        e2e_due_s: When the last token is due: ``arrival_s + e2e_s``.
        weight: What the request is worth if it meets its targets, > 0.
        priority: Smaller is more urgent, as in vLLM.
        service: Its service, as `Services` counts them.
        queue_pos: First-come-first-served position; preempted requests get one in front.
        num_prompt, max_tokens: Tokens.
        length_class: Class of the output-length distribution.
        num_computed: Tokens whose KV exists or is being computed; exact while in PREFILL. While
            WAITING those that a prefix cache is expected to hold.
        prefill_target: Tokens to compute before the next token can be sampled.
        num_output: Output tokens delivered.
        num_in_flight: Steps in flight that sample a token of the request; counted by
            `StepsInFlight`, as tokens are.
        first_token_s, last_token_s: Delivery times, seconds; NaN before the first token.
        num_preemptions: Times the request lost its KV.
        predicted: Quantiles of the total output tokens, as in `LengthPrediction`; NaN without one.
            Written by `predict` alone.
        ewt_s: Estimated wait until the request runs (again), seconds; 0 while it runs, NaN while
            nobody has estimated it.
        served_by_s: When the longest wait of one that misses its targets anyway ends.
        lost_s, need_s: When a planner first found that the request would miss a target, and the
            time that its first token needed then at least, seconds; NaN before, and where no such
            time is known.

    Attributes:
        records: All of it, [capacity].
        num_predicted: Live rows with a prediction.
        num_added: Rows given so far.
        epoch: Moves with every event that changes who is there, their phases, or what is known
            of them beforehand. While it stands, they only compute and deliver tokens.
        num_in_phase: Live rows by phase, [5].
    """

    records: Records
    phase: NDArray[np.int8]
    serial: IntArray
    arrival_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    due_s: FloatArray
    e2e_s: FloatArray
    e2e_due_s: FloatArray
    weight: FloatArray
    priority: IntArray
    service: IntArray
    queue_pos: IntArray
    num_prompt: IntArray
    max_tokens: IntArray
    length_class: NDArray[np.int32]
    num_computed: IntArray
    prefill_target: IntArray
    num_output: IntArray
    num_in_flight: IntArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    num_preemptions: IntArray
    predicted: FloatArray
    ewt_s: FloatArray
    served_by_s: FloatArray
    lost_s: FloatArray
    need_s: FloatArray

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.row_of: dict[str, int] = {}
        self.req_id: list[str | None] = [None] * capacity
        self.num_predicted = self.num_added = self.epoch = 0
        self.num_in_phase: IntArray = np.zeros(_NUM_PHASES, dtype=np.int64)
        self._counts: memoryview = self.num_in_phase.data  # the same, quicker one by one
        self._free = list(range(capacity - 1, -1, -1))
        self._waiting = array("q")  # rows, ascending
        self._waiting_rows: IntArray | None = _NO_ROWS  # the same, unless None
        self._put(_new_records(capacity))
        loops.warm_up(self.records)
        self._put_new = for_types_of(loops.put, self.records, *(0,) * 3, *(0.0,) * 6, *(0,) * 7)

    def __len__(self) -> int:
        return len(self.row_of)

    def add(
        self,
        req_id: str,
        *,
        arrival_s: float = 0.0,
        ttft_s: float = math.inf,
        tpot_s: float = math.inf,
        e2e_s: float = math.inf,
        max_wait_s: float = math.inf,
        weight: float = 1.0,
        priority: int = 0,
        service: int = 0,
        length_class: int = 0,
        queue_pos: int = 0,
        num_prompt: int = 0,
        num_cached: int = 0,
        max_tokens: int = 0,
    ) -> int:
        """Give `req_id` a row in WAITING, with every other column at its default.

        Args:
            max_wait_s: Longest wait of one that misses its targets anyway, seconds.
            num_cached: Tokens of its prompt that need not be computed.
            The rest: the columns of that name.

        Raises:
            ValueError: The request is in the table already.
        """
        if req_id in self.row_of:
            raise ValueError(f"request {req_id!r} must be new (it is in the table already).")
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.row_of[req_id] = row
        self.req_id[row] = req_id
        self._put_new(
            self.records, row, WAITING, self.num_added, arrival_s, ttft_s, tpot_s, e2e_s,
            max_wait_s, weight, priority, service, length_class, queue_pos, num_prompt,
            num_cached, max_tokens,
        )  # fmt: skip
        self.num_added += 1
        self._counts[WAITING] += 1
        self._wait(row)
        self.epoch += 1
        return row

    def remove(self, req_id: str) -> None:
        """Free the row of `req_id`; its values stay readable until the row is reused."""
        row = self.row_of.pop(req_id)
        self.req_id[row] = None
        self.num_predicted -= not math.isnan(self.predicted[row, 0])
        self.move(row, FREE)
        self._free.append(row)

    def values(self, row: int) -> RequestValues:
        """All of a row, at once."""
        return RequestValues(*self.records[row].item())

    def move(self, row: int, phase: int) -> None:
        """Put a row into another phase."""
        was = int(self.phase[row])
        if was == WAITING:
            del self._waiting[bisect_left(self._waiting, row)]
            self._waiting_rows = None
        if phase == WAITING:
            self._wait(row)
        self._counts[was] -= 1
        self._counts[phase] += 1
        self.phase[row] = phase
        self.epoch += 1

    def _wait(self, row: int) -> None:
        insort(self._waiting, row)
        self._waiting_rows = None

    @property
    def waiting(self) -> IntArray:
        """Rows in WAITING, ascending; not to be changed."""
        if self._waiting_rows is None:
            self._waiting_rows = np.array(self._waiting, dtype=np.int64)
        return self._waiting_rows

    def predict(self, row: int, prediction: LengthPrediction) -> None:
        """Note what is predicted of a live row, in place of what was."""
        self.num_predicted += math.isnan(self.predicted[row, 0])
        self.predicted[row] = prediction.quantiles
        self.epoch += 1

    def num_tokens(self, rows: IntArray) -> int:
        """Prompt and delivered output tokens of these rows, in sum."""
        return int(loops.sum_tokens(self.records, rows))

    def shortest_tpot_s(self, rows: IntArray) -> float:
        """The shortest TPOT target of these rows, inf for none."""
        return float(loops.shortest_tpot_s(self.records, rows))

    def check_integrity(self) -> None:
        """Assert that rows, names and free list agree (for tests and debug runs)."""
        assert len(self.row_of) + len(self._free) == self.capacity, (
            f"{len(self.row_of)} live + {len(self._free)} free rows != {self.capacity}"
        )
        for req_id, row in self.row_of.items():
            assert self.req_id[row] == req_id, f"row {row}: {self.req_id[row]!r} != {req_id!r}"
            assert self.phase[row] != FREE, f"live request {req_id!r} has a free row"
        live = np.fromiter(self.row_of.values(), np.int64, len(self.row_of))
        num_predicted = int((~np.isnan(self.predicted[live, 0])).sum())
        assert num_predicted == self.num_predicted, f"{num_predicted} != {self.num_predicted}"
        num_in_phase = np.bincount(self.phase[live], minlength=_NUM_PHASES).tolist()
        counted = [0, *self.num_in_phase[1:].tolist()]
        assert num_in_phase == counted, f"{num_in_phase} != {counted}"
        (waiting,) = (self.phase == WAITING).nonzero()
        assert self.waiting.tolist() == waiting.tolist(), f"{self.waiting} != {waiting}"

    def _grow(self) -> None:
        old = self.capacity
        self.capacity = 2 * old
        self._free = list(range(self.capacity - 1, old - 1, -1))
        self.req_id.extend([None] * old)
        records = _new_records(self.capacity)
        records[:old] = self.records
        self._put(records)

    def _put(self, records: Records) -> None:
        self.records = records
        for name in RequestValues._fields:
            setattr(self, name, np.asarray(records[name]))


def _new_records(count: int) -> Records:
    records = records_of(REQUEST, count)
    records[:] = RequestValues()
    return records
