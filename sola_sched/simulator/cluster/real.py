"""An instance with a real scheduler inside: `VirtualEngine` for the cluster's event loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sola_sched.cluster.view import InstanceView
from sola_sched.config.slo import SloTarget
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import Ended, Progress
from sola_sched.simulator.cluster.rows import Columns, Row, running_columns, waiting_columns
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.engine import VirtualEngine
from sola_sched.simulator.request import RequestRecord, VirtualRequest


class Slowed:
    """A step time that can be stretched while the engine runs; pass it to the engine.

    Attributes:
        batch_time: The profile's step time, with the factor in force.
    """

    def __init__(self, batch_time: BatchTime) -> None:
        self.batch_time = batch_time

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        return self.batch_time.factor * self.batch_time.step_time(output, requests)


class RealInstance:
    """See `ClusterEngine`. The engine may have served requests before; its clock goes on.

    Args:
        engine: Made with `step_time` as its step time.
        step_time: Its step time.
        num_gpus: GPUs that share each step.
    """

    def __init__(self, engine: VirtualEngine, step_time: Slowed, *, num_gpus: int = 1) -> None:
        self.engine = engine
        self.next_s = math.inf
        self._step_time = step_time
        self._is_finishing = False
        self._known: dict[str, tuple[VirtualRequest, SloTarget, LengthPrediction]] = {}
        self._ended: list[RequestRecord] = []
        engine.on_finish = self._ended.append
        config = engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        self._block_size = int(cache.block_size)
        self._num_blocks = engine.num_free_blocks
        self._empty = InstanceView(
            model=step_time.batch_time,
            kv_capacity_tokens=self._num_blocks * self._block_size,
            max_num_seqs=int(scheduler.max_num_seqs),
            max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
            max_model_len=int(config.model_config.max_model_len),
            num_gpus=num_gpus,
            serves_lost_last=_serves_lost_last(engine),
        )

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        self._known[request.req_id] = (request, slo, length)
        self.engine.add(request)
        if math.isinf(self.next_s):
            self.engine.clock.now = max(self.engine.clock.now, now_s)
            self.next_s = self.engine.clock.now

    def advance(self, now_s: float) -> Sequence[Ended]:
        """See `ClusterEngine.advance`."""
        engine = self.engine
        engine.clock.now = max(engine.clock.now, now_s)
        if self._is_finishing:
            engine.finish_step()
            self._is_finishing = False
        else:
            due_s = engine.start_step()
            if due_s is not None:
                self.next_s, self._is_finishing = due_s, True
                return ()
        self.next_s = engine.clock.now if engine.has_work or engine.has_arrivals else math.inf
        ended = [_ended(record) for record in self._ended]
        for record in self._ended:
            del self._known[record.req_id]
        self._ended.clear()
        return ended

    def progress(self, req_id: str, now_s: float) -> Progress:
        """See `ClusterEngine.progress`."""
        return _progress(self.engine.record(req_id))

    def remove(self, req_id: str, now_s: float) -> None:
        """See `ClusterEngine.remove`."""
        self.engine.abort(req_id)
        self._ended.clear()
        del self._known[req_id]

    def view(self, now_s: float) -> InstanceView:
        """See `ClusterEngine.view`; a slowdown is not known to the engine's own model."""
        holders = {request.request_id: request for request in self.engine.scheduler.running}
        # What is under way is not done: the scheduler counts it from the launch on.
        under_way = self.engine.in_flight()
        running = [
            self._row(req_id, max(0, int(request.num_computed_tokens) - under_way[req_id]))
            for req_id, request in holders.items()
        ]
        # With those that came during the step: the front end of a replica knows them.
        waiting = [self._row(req_id) for req_id in self._known if req_id not in holders]
        used = self._num_blocks - self.engine.num_free_blocks
        return self._empty.but(
            reported_s=now_s,
            kv_used_tokens=used * self._block_size,
            **waiting_columns(Columns.of(waiting), now_s),
            **running_columns(Columns.of(running), now_s, self._empty.model),
        )

    def slow_down(self, factor: float) -> None:
        """See `ClusterEngine.slow_down`."""
        self._step_time.batch_time = replace(self._step_time.batch_time, factor=factor)

    def _row(self, req_id: str, num_computed: int | None = None) -> Row:
        virtual, slo, length = self._known[req_id]
        record = self.engine.record(req_id)
        first_s = record.first_token_s
        num_prompt = virtual.num_prompt_tokens
        if num_computed is None:
            # A preempted one computes its output again.
            num_prompt += record.num_output_tokens
        return Row(
            num_prompt=num_prompt,
            num_computed=num_computed or 0,
            num_outputs=record.num_output_tokens,
            quantiles=length.quantiles,
            slo=slo,
            arrival_s=virtual.arrival_s,
            first_s=math.nan if first_s is None else first_s,
        )


def _serves_lost_last(engine: VirtualEngine) -> bool:
    config = getattr(engine.scheduler, "sola_config", None)
    return config is not None and config.traits.serves_lost_last


def _progress(record: RequestRecord) -> Progress:
    if record.first_token_s is None or record.last_token_s is None:
        return Progress(0, 0.0, 0.0)
    return Progress(record.num_output_tokens, record.first_token_s, record.last_token_s)


def _ended(record: RequestRecord) -> Ended:
    return Ended(record.req_id, _progress(record), record.is_finished)
