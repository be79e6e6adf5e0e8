"""Feeds a workload to an engine in real time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from sola_sched.bench.backends.base import OnDone, RunOutcome, extra_args, record_of
from sola_sched.bench.backends.clock import Clock
from sola_sched.core.metrics import RequestRecord
from sola_sched.workloads.workload import RequestSpec


class Replay:
    """Feeds requests to an engine when they are due and stamps their tokens.

    Attributes:
        cpu_share: CPU time over wall time while the engine worked, in the last run.
    """

    def __init__(self, engine: Any, clock: Clock, stall_timeout_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._epoch_s = time.time() - clock.now_s()
        self._stall_timeout_s = stall_timeout_s

    def run(
        self,
        requests: Sequence[RequestSpec],
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        records = [record_of(request) for request in requests]
        self._pending = deque(zip(requests, records, strict=True))
        self._live: dict[str, tuple[RequestSpec, RequestRecord]] = {}
        self._step_s = self._step_cpu_s = 0.0
        self._on_done = on_done or (lambda record: None)
        self._start_s = self._progress_s = self._clock.now_s()
        outcome = RunOutcome(records=records, duration_s=0.0, clock=self._clock.name)
        try:
            self._loop(max_concurrency or math.inf, outcome)
        except KeyboardInterrupt:
            outcome.interrupted = True
            self._end_all("interrupted by the user", outcome)
        outcome.duration_s = self._clock.now_s() - self._start_s
        return outcome

    @property
    def cpu_share(self) -> float:
        return self._step_cpu_s / max(self._step_s, 1e-9)

    def wall_s(self) -> float:
        """The replay's clock on the scale of ``time.time``, which vLLM's arrival times use."""
        return self._epoch_s + self._clock.now_s()

    def _loop(self, max_concurrency: float, outcome: RunOutcome) -> None:
        while self._pending or self._live:
            self._admit(max_concurrency)
            if not self._live:
                self._clock.wait_until(self._start_s + self._pending[0][1].arrival_s)
                self._progress_s = self._clock.now_s()
                continue
            step_start_s, step_start_cpu_s = time.perf_counter(), time.process_time()
            outputs = self._engine.step()
            self._step_s += time.perf_counter() - step_start_s
            self._step_cpu_s += time.process_time() - step_start_cpu_s
            now_s = self._clock.now_s()
            if outputs:
                self._progress_s = now_s
                self._stamp(outputs, now_s - self._start_s)
            elif now_s - self._progress_s > self._stall_timeout_s:
                self._end_all(f"no token for {self._stall_timeout_s:g} s", outcome)
            else:
                time.sleep(0)

    def _admit(self, max_concurrency: float) -> None:
        now_s = self._clock.now_s() - self._start_s
        while (
            self._pending
            and self._pending[0][1].arrival_s <= now_s
            and len(self._live) < max_concurrency
        ):
            request, record = self._pending.popleft()
            record.sent_s = now_s
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.output_tokens,
                min_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=extra_args(request.slo, request.slo_class),
            )
            self._live[request.req_id] = (request, record)
            try:
                self._engine.add_request(
                    request.req_id,
                    {"prompt_token_ids": list(request.prompt_token_ids)},
                    params,
                    arrival_time=self._epoch_s + self._start_s + request.arrival_s,
                )
            except ValueError as error:
                self._finish(request.req_id, f"refused: {error}")

    def _stamp(self, outputs: Sequence[Any], now_s: float) -> None:
        for output in outputs:
            if output.request_id not in self._live:
                continue
            request, record = self._live[output.request_id]
            completion = output.outputs[0]
            record.token_times_s.extend([now_s] * len(completion.token_ids))
            if not output.finished:
                continue
            if record.num_output_tokens == request.output_tokens:
                self._finish(output.request_id)
            else:
                self._finish(
                    output.request_id,
                    f"ended ({completion.finish_reason}) after {record.num_output_tokens} of "
                    f"{request.output_tokens} tokens",
                )

    def _finish(self, req_id: str, error: str = "") -> None:
        _, record = self._live.pop(req_id)
        record.error = error
        record.completed = not error
        self._on_done(record)

    def _end_all(self, reason: str, outcome: RunOutcome) -> None:
        left = [*self._live.values(), *self._pending]
        self._engine.abort_request(list(self._live))
        self._live.clear()
        self._pending.clear()
        for _, record in left:
            record.error = reason
        outcome.notes.append(f"{len(left)} of {len(outcome.records)} requests ended: {reason}.")
