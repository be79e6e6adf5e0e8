"""Virtual-time engine: a real vLLM scheduler with the forward pass replaced by a step time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sola_sched.simulator.host import (
    make_block_hasher,
    make_request,
    make_scheduler,
    make_vllm_config,
)
from sola_sched.simulator.request import RequestRecord, VirtualRequest
from sola_sched.simulator.scheduling_time import SchedulingTime

if TYPE_CHECKING:
    from sola_sched.simulator.swap_link import LinkSpeed

StepTime = Callable[[SchedulerOutput, Mapping[str, Request]], float]

#: Pause of the engine core after a step without tokens while requests are unfinished.
_IDLE_S = 1e-3


class SchedulerStallError(RuntimeError):
    """The scheduler delivers nothing for too long although requests are unfinished."""


class VirtualClock:
    """Monotonic seconds that only the engine moves; calling it reads them.

    Attributes:
        now: Current virtual time, seconds; settable.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class StepTrace:
    """One executed step.

    Attributes:
        output: What the scheduler decided.
        scheduled_s: When it decided.
        start_s, end_s: Execution; under async scheduling it starts when the step before ends.
        sampling: Ids of the requests that sample a token in this step.
        copies: What the step's output tells of KV copies, None without any.
    """

    output: SchedulerOutput
    scheduled_s: float
    start_s: float
    end_s: float
    sampling: list[str]
    copies: Any = None


class VirtualEngine:
    """Drives a scheduler class through the loop of vLLM's engine core, in virtual time.

    The scheduler, its KV cache manager and its requests are the real ones. One `step()` is one
    iteration of the engine core: requests that have arrived are added, `schedule()` is called,
    the step runs for `step_time` virtual seconds, aborts that came in meanwhile are processed,
    and `update_from_output()` delivers the sampled tokens. Under async scheduling the loop is
    the core's pipeline of depth two: a step is scheduled while the one before executes, and
    starts when that one ends. Scheduling takes no virtual time unless `scheduling_time` is given.
    Then the clock moves with both calls: each step of a synchronous engine is longer by that, while
    an asynchronous one schedules beside the step before and waits only for what exceeds it.

    Args:
        scheduler_cls: A subclass of vLLM's `Scheduler`. Attributes `sola_clock` and
            `sola_wall_clock`, where it has them, are set to `clock`.
        model: A preset of `host.MODELS` or the content of a `config.json`.
        num_blocks: KV blocks, the null block included.
        step_time: Seconds of a step, called right after `schedule()` with its result and the
            live requests; `StepTimeModel` is one.
        clock: The time; arrivals and aborts are on its scale.
        stall_limit_s: Virtual seconds in which no token is delivered and no request ends,
            although requests are unfinished, after which `step()` raises.
        scheduling_time: What the scheduler's own calls take, half of it each; ``"measured"`` for
            the processor time of the very run, None for nothing.
        swap_link: Link over which our scheduler swaps KV; None has preempted requests computed
            again.

    Attributes:
        on_finish: Called when a request ends, with its record; `run` sets it.
    """

    def __init__(
        self,
        scheduler_cls: type[Any],
        *,
        model: str | Mapping[str, Any] = "llama-3-8b",
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 8192,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        async_scheduling: bool = False,
        enable_prefix_caching: bool = False,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        additional_config: Mapping[str, Any] | None = None,
        step_time: StepTime,
        clock: VirtualClock | None = None,
        stall_limit_s: float = 300.0,
        scheduling_time: SchedulingTime | Literal["measured"] | None = None,
        swap_link: LinkSpeed | None = None,
    ) -> None:
        self.vllm_config = make_vllm_config(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            additional_config=additional_config,
        )
        self.clock = clock if clock is not None else VirtualClock()
        self.num_steps = 0
        self.on_finish: Callable[[RequestRecord], None] | None = None
        self._step_time = step_time
        self._stall_limit_s = stall_limit_s
        self._scheduling_time = scheduling_time
        self._depth = 2 if async_scheduling else 1
        self._vocab_size = self.vllm_config.model_config.get_vocab_size()
        self._block_hasher = make_block_hasher(self.vllm_config)
        self._swap_link: Any = None
        if swap_link is None:
            self._scheduler = make_scheduler(scheduler_cls, self.vllm_config)
        else:
            # Loads the connector, which older vLLM versions have no base for.
            from sola_sched.simulator.swap_link import SwapLink, name_connector

            name_connector(self.vllm_config, scheduler_cls)
            self._scheduler = make_scheduler(scheduler_cls, self.vllm_config)
            if self._scheduler.connector.manager is not None:
                self._swap_link = SwapLink(self._scheduler.connector, swap_link)
        for name in ("sola_clock", "sola_wall_clock"):
            if hasattr(self._scheduler, name):
                setattr(self._scheduler, name, self.clock)
        self._in_flight: deque[StepTrace] = deque()
        self._device_free_s = self.clock.now
        self._progress_s = self.clock.now
        self._sequence = itertools.count()
        self._arrivals: list[tuple[float, int, VirtualRequest]] = []
        self._aborts: list[tuple[float, str]] = []
        self._virtual: dict[str, VirtualRequest] = {}
        self._requests: dict[str, Request] = {}
        self._records: dict[str, RequestRecord] = {}

    @property
    def scheduler(self) -> Any:
        """The scheduler under test."""
        return self._scheduler

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks; `num_blocks` - 1 (the null block) when nothing is held."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def in_flight(self) -> Counter[str]:
        """Tokens of the steps that have been launched and not delivered, by request."""
        tokens: Counter[str] = Counter()
        for trace in self._in_flight:
            tokens.update(trace.output.num_scheduled_tokens)
        return tokens

    @property
    def records(self) -> list[RequestRecord]:
        """Records of all requests so far, in the order in which they were added."""
        return list(self._records.values())

    @property
    def has_work(self) -> bool:
        """True while the engine core would keep looping without new requests."""
        return bool(self._in_flight) or self._scheduler.has_requests()

    @property
    def has_arrivals(self) -> bool:
        """True while a request has been added that has not reached the scheduler."""
        return bool(self._arrivals)

    def record(self, req_id: str) -> RequestRecord:
        """The record of one request."""
        return self._records[req_id]

    def add(self, request: VirtualRequest) -> None:
        """Hand over a request; it reaches the scheduler in the first step after its arrival."""
        if request.req_id in self._records:
            raise ValueError(f"'req_id' must be unique (got {request.req_id!r} again).")
        self._requests[request.req_id] = make_request(request, self.vllm_config, self._block_hasher)
        self._virtual[request.req_id] = request
        self._records[request.req_id] = RequestRecord(
            request.req_id, request.arrival_s, request.num_prompt_tokens
        )
        heapq.heappush(self._arrivals, (request.arrival_s, next(self._sequence), request))
        if request.abort_s is not None:
            heapq.heappush(self._aborts, (request.abort_s, request.req_id))

    def abort(self, req_id: str) -> None:
        """End a request now, as when its client disconnects; ended ones are left alone."""
        record = self._records[req_id]
        if record.finish_reason is not None:
            return
        self._scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self._finish(record, "abort")

    def run(
        self,
        requests: Sequence[VirtualRequest] = (),
        *,
        on_step: Callable[[StepTrace], None] | None = None,
        on_finish: Callable[[RequestRecord], None] | None = None,
    ) -> list[RequestRecord]:
        """Serve `requests` and all that were added before, until every one has ended.

        Args:
            requests: In any order.
            on_step: Called after each step that was delivered.
            on_finish: Called when a request ends, with its record; it may `add` further ones.

        Raises:
            SchedulerStallError: The scheduler delivers nothing for `stall_limit_s`.
            RuntimeError: The scheduler forgets a request.
        """
        self.on_finish = on_finish
        for request in requests:
            self.add(request)
        while self._arrivals or self.has_work:
            if not self.has_work:
                self._advance(self._arrivals[0][0])
            trace = self.step()
            if trace is not None and on_step is not None:
                on_step(trace)
        lost = [r.req_id for r in self._records.values() if r.finish_reason is None]
        if lost:
            raise RuntimeError(
                f"the scheduler has no work left but {len(lost)} of {len(self._records)} "
                f"requests never ended, first {lost[0]!r}."
            )
        return self.records

    def step(self) -> StepTrace | None:
        """One iteration of the engine core.

        Returns:
            The step whose output was delivered; None if there was none, as when the pipeline
            of async scheduling is being filled.
        """
        return None if self.start_step() is None else self.finish_step()

    def start_step(self) -> float | None:
        """First half of an iteration: admit what has arrived, and schedule and launch a step.

        Between the halves nothing happens in the engine, so that a loop over several engines can
        take them in the order of their times.

        Returns:
            When the output of the oldest step in flight is due, for `finish_step`; None if none
            is to be delivered in this iteration.
        """
        self.admit()
        if self._scheduler.has_requests():
            trace = self._launch()
            executed = bool(trace.output.total_num_scheduled_tokens)
            pipeline_has_room = len(self._in_flight) < self._depth
            if pipeline_has_room and (executed or self._scheduler.has_requests()):
                return None
        elif not self._in_flight:
            return None
        return self._in_flight[0].end_s

    def finish_step(self) -> StepTrace:
        """Second half: the oldest step in flight ends, and its output is delivered.

        The clock moves to its end, unless it is past that already.
        """
        trace = self._in_flight.popleft()
        self._advance(trace.end_s)
        if trace.output.total_num_scheduled_tokens:
            self.num_steps += 1
        elif not self._is_executing() and self._waits():
            self._advance(self.clock.now + _IDLE_S)
        sampled, cpu_s = self._sample(trace), time.thread_time()
        outputs = self._scheduler.update_from_output(trace.output, sampled)
        self._charge(trace.output, cpu_s)
        for batch in outputs.values():
            self._record(batch.outputs)
        self._check_progress(delivered=any(batch.outputs for batch in outputs.values()))
        return trace

    def _waits(self) -> bool:
        """Whether something goes on without steps: requests, or copies of some that have ended."""
        if self._swap_link is not None:
            return bool(self._scheduler.has_requests())
        return bool(self._scheduler.has_unfinished_requests())

    def admit(self) -> None:
        """Hand the scheduler what has arrived; `start_step` does that first."""
        while self._arrivals and self._arrivals[0][0] <= self.clock.now:
            _, _, virtual = heapq.heappop(self._arrivals)
            if self._records[virtual.req_id].finish_reason is None:
                if not self.has_work:
                    self._progress_s = self.clock.now
                self._scheduler.add_request(self._requests[virtual.req_id])
        self._abort_due(self.clock.now)

    def _launch(self) -> StepTrace:
        now_s = self.clock.now
        cpu_s = time.thread_time()
        output = self._scheduler.schedule()
        self._charge(output, cpu_s)
        requests = self._scheduler.requests
        start_s = max(self.clock.now, self._device_free_s)
        end_s = start_s + self._step_time(output, requests)
        self._device_free_s = end_s
        sampling = []
        for req_id in output.num_scheduled_tokens:
            if not requests[req_id].is_prefill_chunk:
                sampling.append(req_id)
            record = self._records[req_id]
            if record.scheduled_s is None:
                record.scheduled_s = start_s
        trace = StepTrace(output, now_s, start_s, end_s, sampling)
        if self._swap_link is not None:
            trace.copies = self._swap_link.poll(start_s)
            self._swap_link.submit(output.kv_connector_metadata.jobs, end_s)
        self._in_flight.append(trace)
        return trace

    def _charge(self, output: SchedulerOutput, cpu_s: float) -> None:
        """Let the clock move by what a call took that began at `cpu_s` of the thread's time."""
        model = self._scheduling_time
        if model is None:
            return
        if isinstance(model, SchedulingTime):
            self.clock.now += 0.5 * model.step_s(len(output.num_scheduled_tokens))
        else:
            self.clock.now += time.thread_time() - cpu_s

    def _is_executing(self) -> bool:
        return any(trace.output.total_num_scheduled_tokens for trace in self._in_flight)

    def _check_progress(self, *, delivered: bool) -> None:
        if delivered or not self._scheduler.has_unfinished_requests():
            self._progress_s = self.clock.now
        elif self.clock.now - self._progress_s > self._stall_limit_s:
            num_running, num_waiting = self._scheduler.get_request_counts()
            raise SchedulerStallError(
                f"the scheduler must deliver a token within {self._stall_limit_s:g} s (none "
                f"since {self._progress_s:g} s; running {num_running}, waiting {num_waiting}, "
                f"free blocks {self.num_free_blocks})."
            )

    def _advance(self, to_s: float) -> None:
        self.clock.now = max(self.clock.now, to_s)
        self._abort_due(self.clock.now)

    def _abort_due(self, now_s: float) -> None:
        while self._aborts and self._aborts[0][0] <= now_s:
            self.abort(heapq.heappop(self._aborts)[1])

    def _sample(self, trace: StepTrace) -> ModelRunnerOutput:
        req_ids = list(trace.output.num_scheduled_tokens)
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        tokens: list[list[int]] = [[] for _ in req_ids]
        for req_id in trace.sampling:
            # Outputs are delivered first in, first out, so the count gives the position.
            position = self._requests[req_id].num_output_tokens
            token = self._virtual[req_id].output_token(position, self._vocab_size)
            tokens[index[req_id]] = [token]
        return ModelRunnerOutput(
            req_ids, index, sampled_token_ids=tokens, kv_connector_output=trace.copies
        )

    def _record(self, outputs: Iterable[Any]) -> None:
        now_s = self.clock.now
        for output in outputs:
            record = self._records[output.request_id]
            if output.new_token_ids:
                if record.first_token_s is None:
                    record.first_token_s = now_s
                record.last_token_s = now_s
                record.num_output_tokens += len(output.new_token_ids)
                record.token_times_s.extend([now_s] * len(output.new_token_ids))
            if output.finish_reason is not None:
                self._finish(record, str(output.finish_reason))

    def _finish(self, record: RequestRecord, reason: str) -> None:
        record.finish_reason = reason
        record.finished_s = self.clock.now
        record.num_preemptions = self._requests[record.req_id].num_preemptions
        if self.on_finish is not None:
            self.on_finish(record)
