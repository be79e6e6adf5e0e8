"""The fast model as the cluster drives it.

What it leaves out: blocks (each request is taken to waste half a block) and cached prefixes. Its
error against real schedulers is measured by `python benchmarks/run.py cluster-fast`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sola_sched.cluster.view import InstanceView
from sola_sched.compiled.functions import Records, for_types_of, records_of
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import REQUEST
from sola_sched.core.traffic import RecentTraffic
from sola_sched.cost.file import Coefficients
from sola_sched.cost.memory import new_memory
from sola_sched.cost.times import LINEAR, linear_of
from sola_sched.planner.attain import records
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import Ended, Progress
from sola_sched.simulator.cluster.fast import steps
from sola_sched.simulator.cluster.fast.learned import (
    FIRST_FIT,
    NUM_REMEMBERED,
    first_fit,
    fit_again,
)
from sola_sched.simulator.cluster.fast.state import ENDED, ENGINE, NUM_LISTS, TRUTH, Engine
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

    #: Whether it does what `sola_sched` does; see `plans`.
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
        record = records_of(ENGINE, 1)
        at = self._at = record[0]
        at["capacity"], at["slots"], at["budget"] = (
            kv_capacity_tokens, max_num_seqs, max_num_batched_tokens,
        )  # fmt: skip
        at["half_block"], at["is_slo"], at["is_async"] = block_size / 2, self._is_slo, is_async
        at["known_until_s"], at["next_s"], at["next_fit"] = math.inf, math.inf, FIRST_FIT
        # What compiled functions take; see `state.Engine`.
        self._engine = Engine(
            record,
            records_of(REQUEST, _NUM_FIRST),
            records_of(TRUTH, _NUM_FIRST),
            np.zeros((NUM_LISTS, _NUM_FIRST + 1), np.int64),
            pack(batch_time),
            new_memory(NUM_REMEMBERED),
            records_of(records.STEP, 1),
            records.tuning_of(SolaConfig()),
            records.new_account(),
            *records.room_for(_NUM_FIRST),
        )
        plan = self._engine.plan[0]
        plan["max_num_tokens"], plan["max_num_running"] = max_num_batched_tokens, max_num_seqs
        plan["block_size"], plan["num_blocks"] = block_size, kv_capacity_tokens // block_size
        plan["tokens_per_decode"], plan["per_step"], plan["chunks_prefills"] = 1, 1.0, True
        self._fit = first_fit(batch_time)
        self._take_fit()
        lengths = LengthPrediction.exactly(1).quantiles
        some = (0, 1, 1, 1, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, lengths, 0.0)
        self._add = for_types_of(steps.add, *some, *self._engine)
        self._steps_on = for_types_of(steps.advance, 0.0, *self._engine)
        self._free = list(range(_NUM_FIRST))
        self._names = [""] * _NUM_FIRST
        self._row_of: dict[str, int] = {}

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._names[row] = request.req_id
        self._row_of[request.req_id] = row
        most = request.output_len if request.max_tokens is None else request.max_tokens
        self.next_s = self._add(
            row, request.num_prompt_tokens, request.output_len, most, slo.ttft_s, slo.tpot_s,
            slo.e2e_s, slo.weight, slo.max_wait_s, request.arrival_s, length.quantiles, now_s,
            *self._engine,
        )  # fmt: skip

    def advance(self, now_s: float) -> Sequence[Ended]:
        """See `ClusterEngine.advance`."""
        num_ended, self.next_s = self._steps_on(now_s, *self._engine)
        if self._at["is_fit_due"]:
            self._fit = fit_again(self._engine.memory, self._at["num_done"], self._fit)
            self._take_fit()
        if not num_ended:
            return ()
        ended = self._ended(num_ended, now_s)
        _, self.next_s = self._steps_on(now_s, *self._engine)
        return ended

    def _take_fit(self) -> None:
        """Let the planner go by the step times that were fitted last."""
        self._at["is_fit_due"] = False
        plan = self._engine.plan
        linear = Coefficients.from_fit(self._fit, has_prefill=True, has_decode=True)
        plan[list(LINEAR)][0] = linear_of(linear)
        plan["gamma"] = 1.0

    def progress(self, req_id: str, now_s: float) -> Progress:
        """See `ClusterEngine.progress`."""
        row = self._row_of.get(req_id)
        if row is None:
            return Progress(0, 0.0, 0.0)
        return Progress(*steps.progress(row, now_s, *self._engine))

    def remove(self, req_id: str, now_s: float) -> None:
        """See `ClusterEngine.remove`."""
        row = self._row_of.pop(req_id, None)
        if row is not None:
            steps.remove(row, *self._engine)
            self._free.append(row)

    def view(self, now_s: float) -> InstanceView:
        """See `ClusterEngine.view`."""
        num_used, waiting, of_waiting, running, of_running = steps.rows(now_s, *self._engine)
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
        for row in self._engine.lists[ENDED, 1 : count + 1].tolist():
            name, first_s = self._names[row], float(self._engine.requests[row]["first_token_s"])
            progress = Progress(int(self._engine.truth[row]["output_len"]), first_s, now_s)
            ended.append(Ended(name, progress, True))
            del self._row_of[name]
            self._free.append(row)
        return ended

    def _grow(self) -> None:
        engine, count = self._engine, len(self._engine.requests)
        decodes, prefills, plan_lists = records.room_for(2 * count)
        self._engine = engine._replace(
            requests=_doubled(engine.requests),
            truth=_doubled(engine.truth),
            lists=np.concatenate((engine.lists, np.zeros((NUM_LISTS, count), np.int64)), axis=1),
            decodes=decodes,
            prefills=prefills,
            plan_lists=plan_lists,
        )
        self._free += range(count, 2 * count)
        self._names += [""] * count


def _doubled(found: Records) -> Records:
    made = records_of(found.dtype, 2 * len(found))
    made[: len(found)] = found
    return made


class FastSloInstance(FastInstance):
    """The fast model with the planner of `sola_sched`; see `FastInstance` and `plans`."""

    _is_slo = True

    def __init__(self, batch_time: BatchTime, **options: Any) -> None:
        super().__init__(batch_time, **options)
        self._traffic = RecentTraffic()
        self._told = self._engine.plan[records.TRAFFIC]

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
        self._told[0] = self._traffic.means()
