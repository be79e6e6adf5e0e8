"""The fast model as the cluster drives it.

What it leaves out: blocks (each request is taken to waste half a block), cached prefixes, the extra
step that a request which ends by itself takes in an asynchronous pipeline, and most of the planner
of `sola_sched` (see `prompts`). Its error against real schedulers is measured by
`python benchmarks/run.py cluster-fast`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sola_sched.cluster.view import InstanceView
from sola_sched.config.slo import SloTarget
from sola_sched.core.traffic import RecentTraffic
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import Ended, Progress
from sola_sched.simulator.cluster.fast import steps
from sola_sched.simulator.cluster.fast.state import (
    ENDED,
    ENGINE,
    NUM_LISTS,
    REQUEST,
    Engine,
)
from sola_sched.simulator.cluster.fast.times import pack
from sola_sched.simulator.cluster.rows import Columns, running_columns, waiting_columns
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest

#: Requests that there is room for at first; it doubles.
_NUM_FIRST = 64


class FastInstance:
    """First come, first served, with chunked prompts, as vLLM does it. See `ClusterEngine`.

    Args:
        batch_time: Step times.
        kv_capacity_tokens: Tokens of KV.
        max_num_seqs: Most requests that run.
        max_num_batched_tokens: Tokens of a step.
        max_model_len: Longest prompt + output.
        num_gpus: GPUs that share a step.
        block_size: Tokens of a block.
        is_async: A step is scheduled while the one before runs, so that what arrives during a step
            waits for the next one too.

    Raises:
        ConfigError: The step time has no compiled form.
    """

    #: Whether it does what `sola_sched` does; see `prompts`.
    _is_slo = False

    def __init__(
        self,
        batch_time: BatchTime,
        *,
        kv_capacity_tokens: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        num_gpus: int = 1,
        block_size: int = 16,
        is_async: bool = True,
    ) -> None:
        self.next_s = math.inf
        self._batch_time = batch_time
        self._empty = InstanceView(
            model=batch_time,
            kv_capacity_tokens=kv_capacity_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_gpus=num_gpus,
            serves_lost_last=self._is_slo,
        )
        record = np.zeros(1, ENGINE)
        at = self._at = record[0]
        at["capacity"], at["slots"], at["budget"] = (
            kv_capacity_tokens, max_num_seqs, max_num_batched_tokens,
        )  # fmt: skip
        at["half_block"], at["is_slo"], at["is_async"] = block_size / 2, self._is_slo, is_async
        at["known_until_s"] = at["next_s"] = at["tightest_s"] = math.inf
        at["loosest_s"] = -math.inf
        at["mean_output"] = math.nan
        # What compiled functions take; see `state.Engine`.
        self._engine = Engine(
            record,
            np.zeros(_NUM_FIRST, REQUEST),
            np.zeros((NUM_LISTS, _NUM_FIRST + 1), np.int64),
            pack(batch_time),
        )
        self._free = list(range(_NUM_FIRST))
        self._names = [""] * _NUM_FIRST
        self._slot_of: dict[str, int] = {}

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._names[slot] = request.req_id
        self._slot_of[request.req_id] = slot
        self.next_s = steps.add(
            *self._engine, slot, request.num_prompt_tokens, request.output_len, slo.ttft_s,
            slo.tpot_s, request.arrival_s, length.quantiles, now_s,
        )  # fmt: skip

    def advance(self, now_s: float) -> Sequence[Ended]:
        """See `ClusterEngine.advance`."""
        num_ended, self.next_s = steps.advance(*self._engine, now_s)
        if not num_ended:
            return ()
        ended = self._ended(num_ended, now_s)
        _, self.next_s = steps.advance(*self._engine, now_s)
        return ended

    def progress(self, req_id: str, now_s: float) -> Progress:
        """See `ClusterEngine.progress`."""
        slot = self._slot_of.get(req_id)
        if slot is None:
            return Progress(0, 0.0, 0.0)
        return Progress(*steps.progress(*self._engine, slot, now_s))

    def remove(self, req_id: str, now_s: float) -> None:
        """See `ClusterEngine.remove`."""
        slot = self._slot_of.pop(req_id, None)
        if slot is not None:
            steps.remove(*self._engine, slot)
            self._free.append(slot)

    def view(self, now_s: float) -> InstanceView:
        """See `ClusterEngine.view`."""
        num_used, waiting, of_waiting, running, of_running = steps.rows(*self._engine, now_s)
        return self._empty.but(
            reported_s=now_s,
            kv_used_tokens=num_used,
            **waiting_columns(Columns.of_arrays(waiting, of_waiting), now_s),
            **running_columns(Columns.of_arrays(running, of_running), now_s, self._batch_time),
        )

    def slow_down(self, factor: float) -> None:
        """See `ClusterEngine.slow_down`."""
        self._batch_time = replace(self._batch_time, factor=factor)
        self._engine = self._engine._replace(times=pack(self._batch_time))

    def _ended(self, count: int, now_s: float) -> list[Ended]:
        ended = []
        for slot in self._engine.lists[ENDED, 1 : count + 1].tolist():
            request, name = self._engine.requests[slot], self._names[slot]
            progress = Progress(int(request["output_len"]), float(request["first_s"]), now_s)
            ended.append(Ended(name, progress, True))
            del self._slot_of[name]
            self._free.append(slot)
        return ended

    def _grow(self) -> None:
        requests, lists = self._engine.requests, self._engine.lists
        count = len(requests)
        self._engine = self._engine._replace(
            requests=np.concatenate((requests, np.zeros(count, REQUEST))),
            lists=np.concatenate((lists, np.zeros((NUM_LISTS, count), np.int64)), axis=1),
        )
        self._free += range(count, 2 * count)
        self._names += [""] * count


class FastSloInstance(FastInstance):
    """The fast model with what `sola_sched` does to requests; see `FastInstance` and `prompts`."""

    _is_slo = True

    def __init__(self, batch_time: BatchTime, **options: Any) -> None:
        super().__init__(batch_time, **options)
        self._traffic = RecentTraffic()

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        self._traffic.came(now_s, request.num_prompt_tokens)
        self._note_traffic()
        super().add(request, slo, length, now_s)

    def _ended(self, count: int, now_s: float) -> list[Ended]:
        ended = super()._ended(count, now_s)
        for end in ended:
            self._traffic.ended(end.progress.num_tokens)
        self._note_traffic()
        return ended

    def _note_traffic(self) -> None:
        at = self._at
        at["num_came"], at["first_came_s"], at["mean_prompt"], at["mean_output"] = (
            self._traffic.means()
        )
