"""Carries copies out beside the model: threads on a CPU, side streams on a CUDA device.

Both take a function per copy and report its end later, in any order. The order against the model
is the same: a copy sees what the steps submitted before it have written, and nobody reuses its
blocks before its end was reported.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sola_sched.kv_swap.jobs import Job

#: Little against a step on a CPU, enough for a thread to be scheduled.
_YIELD_S = 1e-4


@dataclass(frozen=True, slots=True)
class Ended:
    """A copy that ended: `error` is None if it succeeded.

    `elapsed_s` is what the copy took, without the time until its turn came and until its end was
    noticed.
    """

    job: Job
    error: BaseException | None
    elapsed_s: float


class Transfers(Protocol):
    """Copies under way on one worker."""

    def submit(self, job: Job, copy: Callable[[Job], None]) -> None:
        """Start a copy, ordered after all steps submitted so far."""

    def poll(self) -> list[Ended]:
        """The copies that ended since the last call; does not wait."""

    def close(self) -> None:
        """Wait for copies under way and release everything."""


class ThreadTransfers:
    """Copies in threads; on a CPU a step is over when the next one is submitted.

    Attributes:
        delay_polls: Polls for which a copy is held back before it starts, by job; for tests of
            late copies.
        before_copy: Called in the thread before each copy; may wait or raise, for tests.
    """

    def __init__(self, num_threads: int = 2) -> None:
        self.delay_polls: Callable[[Job], int] | None = None
        self.before_copy: Callable[[Job], None] | None = None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-swap")
        self._held: list[tuple[int, Job, Callable[[Job], None]]] = []
        self._running: list[tuple[Job, Future[float]]] = []  # a copy's result is what it took, s

    def submit(self, job: Job, copy: Callable[[Job], None]) -> None:
        """See `Transfers.submit`."""
        polls = self.delay_polls(job) if self.delay_polls else 0
        if polls:
            self._held.append((polls, job, copy))
        else:
            self._start(job, copy)

    def poll(self) -> list[Ended]:
        """See `Transfers.poll`.

        While copies run it gives them the interpreter for a moment: an engine with nothing else to
        do polls without a pause, and each of a copy's calls would wait 5 ms for its turn.
        """
        if not self._held and not self._running:
            return []
        held, self._held = self._held, []
        for polls, job, copy in held:
            if polls > 1:
                self._held.append((polls - 1, job, copy))
            else:
                self._start(job, copy)
        if not all(future.done() for _, future in self._running):
            time.sleep(_YIELD_S)
        ended, running = [], []
        for job, future in self._running:
            if future.done():
                error = future.exception()
                ended.append(Ended(job, error, 0.0 if error else future.result()))
            else:
                running.append((job, future))
        self._running = running
        return ended

    def close(self) -> None:
        """See `Transfers.close`."""
        self._held.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, job: Job, copy: Callable[[Job], None]) -> None:
        task: Future[float] = Future()

        def run() -> None:
            if not task.set_running_or_notify_cancel():
                return
            start_s = time.perf_counter()
            try:
                if self.before_copy:
                    self.before_copy(job)
                copy(job)
            except Exception as error:
                task.set_exception(error)
            else:
                task.set_result(time.perf_counter() - start_s)

        outcome = task
        try:
            self._pool.submit(run)
        except Exception as error:  # no thread can be started
            # A thread that is there may take it all the same: then its end is waited for.
            if task.cancel():
                outcome = Future()
                outcome.set_exception(error)
        self._running.append((job, outcome))


class StreamTransfers:
    """Copies on one side stream per direction; each direction is in order.

    A copy waits for the compute stream as it is at submission. What the compute stream does
    later does not wait for the copy: its end is polled, and only then are its blocks used.

    Args:
        device: The CUDA device.
        cuda: Module with `Stream`, `Event`, `stream` and `current_stream`; for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._streams = {is_load: cuda.Stream(device=device) for is_load in (False, True)}
        self._under_way: dict[bool, deque[tuple[Job, Any, Any]]] = {False: deque(), True: deque()}

    def submit(self, job: Job, copy: Callable[[Job], None]) -> None:
        """See `Transfers.submit`."""
        stream = self._streams[job.is_load]
        stream.wait_stream(self._cuda.current_stream(self._device))
        start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        with self._cuda.stream(stream):
            start.record(stream)
            try:
                copy(job)
            except Exception as error:
                # What was queued before the error still runs, so the end is reported after it.
                end.record(stream)
                self._under_way[job.is_load].append((job, error, (start, end)))
                return
            end.record(stream)
        self._under_way[job.is_load].append((job, None, (start, end)))

    def poll(self) -> list[Ended]:
        """See `Transfers.poll`."""
        ended = []
        for under_way in self._under_way.values():
            while under_way and under_way[0][2][1].query():
                job, error, (start, end) = under_way.popleft()
                ended.append(Ended(job, error, start.elapsed_time(end) / 1e3))
        return ended

    def close(self) -> None:
        """See `Transfers.close`."""
        for stream in self._streams.values():
            stream.synchronize()
        for under_way in self._under_way.values():
            under_way.clear()
