"""Steps in flight: what each computes, and what is known and averaged when it ends."""

from __future__ import annotations

import math
from collections import deque
from functools import cache
from typing import NamedTuple

import numpy as np

from sola_sched.compiled.functions import BoolArray, FloatArray, IntArray, records_of
from sola_sched.core import step_records
from sola_sched.core.step_records import CHUNKS, CLOCK, NUM_LISTS, SAMPLED, STEP, TOKENS
from sola_sched.core.table import RequestTable
from sola_sched.cost import online
from sola_sched.cost.model import CostModel

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
#: Steps in flight that there is room for at first; it doubles.
_NUM_FIRST = 4

#: How a step is divided among services; see `Services.parts_of`.
Parts = tuple[FloatArray, BoolArray] | None


class Averages(NamedTuple):
    """What is known of the steps; see `step_records.CLOCK`."""

    last_update_s: float
    elapsed_s: float
    prefill_share: float
    accepted_per_decode: float
    free_s: float


class StepsInFlight:
    """Follows the steps of an engine, which end in the order in which they began.

    Args:
        cost: Step-time model; learns from each step that ends.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._clock = records_of(CLOCK, 1)
        self._clock["last_update_s"], self._clock["accepted_per_decode"] = -math.inf, 1.0
        self._averages = self._clock[list(Averages._fields)]
        self._expected, self._elapsed = self._clock["num_expected"], self._clock["elapsed_s"]
        self._parts: deque[Parts] = deque()
        self._make_room(_NUM_FIRST, 0)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def averages(self) -> Averages:
        """As they are now."""
        return Averages(*self._averages[0].item())

    def take(self) -> tuple[float, ...]:
        """The `averages`; engine time counts from 0 again."""
        averages: tuple[float, ...] = self._averages[0].item()
        self._elapsed[0] = 0.0
        return averages

    def pass_over(self) -> None:
        """Engine time counts from 0 again."""
        self._elapsed[0] = 0.0

    @property
    def num_expected(self) -> int:
        """As `StateMonitor.num_expected`."""
        return int(self._expected[0])

    @property
    def are_computing(self) -> bool:
        """Whether one of them is not empty."""
        steps = self._steps[self._places()]
        is_empty = (steps["num_decodes"] + steps["tokens"] == 0) & steps["is_known"]
        return not bool(is_empty.all())

    def begin(
        self,
        table: RequestTable,
        decodes: IntArray,
        prefills: IntArray,
        tokens: IntArray,
        now_s: float,
        parts: Parts,
    ) -> None:
        """A step was scheduled; see `StateMonitor.scheduled`.

        Args:
            parts: How it is divided among services.
        """
        if len(self._parts) == len(self._steps) or table.capacity > self._width:
            self._make_more_room(table.capacity)
        table.epoch += step_records.begin_step(
            table.records, table.num_in_phase, self._clock, self._steps, self._lists,
            self._cost.model, decodes, prefills, tokens, now_s,
        )  # fmt: skip
        self._parts.append(parts)

    def begin_unknown(self, table: RequestTable, rows: list[int], now_s: float) -> None:
        """One of which only some that sample are known; it is not learned from."""
        self.begin(table, _NO_ROWS, _NO_ROWS, _NO_ROWS, now_s, None)
        place = self._places()[-1]
        step = self._steps.view(np.recarray)[place]
        step.is_known, step.num_ending = False, len(rows)
        self._lists[place, SAMPLED, : len(rows)] = rows
        table.num_in_flight[rows] += 1
        step_records.look_ahead(self._clock, self._steps)

    def end(
        self, table: RequestTable, now_s: float, rows: IntArray | None, num_tokens: IntArray | None
    ) -> tuple[float, Parts]:
        """The oldest one has ended; see `StateMonitor.completed`.

        Returns:
            How long it took, seconds, and how that is divided among services.
        """
        parts, brings_one = self._parts.popleft(), rows is None
        if rows is None or num_tokens is None:
            rows = num_tokens = _NO_ROWS
        elapsed_s, due = step_records.end_step(
            table.records, self._clock, self._steps, self._lists, self._cost.model,
            self._cost.memory, now_s, brings_one, rows, num_tokens,
        )  # fmt: skip
        if due:
            was_ready = self._cost.is_ready
            self._cost.renew(due)
            table.epoch += self._cost.is_ready != was_ready  # what a planner knows has changed
            step_records.note_share(self._clock, self._steps, self._cost.model)
        return elapsed_s, parts

    def forget_row(self, row: int) -> None:
        """The request in this row is not there any more."""
        if self._parts:
            step_records.forget_row(self._clock, self._steps, self._lists, row)

    def chunks(self, num_rows: int) -> IntArray:
        """Prompt tokens of each row that they compute, [num_rows]."""
        tokens = np.zeros(num_rows, dtype=np.int64)
        for place in self._places():
            lists = self._lists[place, :, : self._steps[place]["num_chunks"]]
            is_there = lists[CHUNKS] >= 0
            np.add.at(tokens, lists[CHUNKS, is_there], lists[TOKENS, is_there])
        return tokens

    def set_last_update(self, now_s: float) -> None:
        """The time of the next step that ends begins now."""
        self._clock["last_update_s"] = now_s
        step_records.look_ahead(self._clock, self._steps)

    def clear(self, now_s: float) -> None:
        """There are none any more, and no time has passed."""
        self._parts.clear()
        self._clock["count"], self._clock["elapsed_s"] = 0, 0.0
        self.set_last_update(now_s)

    def _places(self) -> list[int]:
        """Places in the ring, oldest first."""
        first = int(self._clock["first"][0])
        return [(first + i) % len(self._steps) for i in range(len(self._parts))]

    def _make_more_room(self, capacity: int) -> None:
        """For another one, of any rows of a table of this capacity."""
        places, steps, lists = self._places(), self._steps, self._lists
        self._make_room(max(len(steps), 2 * len(places)), max(capacity, self._width))
        self._steps[: len(places)] = steps[places]
        self._lists[: len(places), :, : lists.shape[2]] = lists[places]
        self._clock["first"] = 0

    def _make_room(self, num_steps: int, width: int) -> None:
        self._steps, self._width = records_of(STEP, num_steps), width
        self._lists: IntArray = np.zeros((num_steps, NUM_LISTS, width), dtype=np.int64)


@cache
def warm_up() -> None:
    """Compile what is not yet compiled; takes some seconds the first time on a machine."""
    online.warm_up()
    table, steps = RequestTable(1), StepsInFlight(CostModel())
    steps.begin_unknown(table, [], 0.0)
    steps.forget_row(0)
    steps.end(table, 0.0, None, None)
    step_records.note_share(steps._clock, steps._steps, steps._cost.model)
