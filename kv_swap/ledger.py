"""What the workers have been sent and have not ended, and the blocks that are kept for it.

It stands apart from the manager, in steps too small to fail halfway. If a booking of the manager
fails, a new one takes its place, and from here it is known what is still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sola_sched.kv_swap.jobs import Job, Report


class Ledger:
    """Knows the copies under way of one engine.

    Args:
        world_size: Workers that report the end of each job.
        pin: Called with blocks that must not be reused until `unpin` gets the same list.
        unpin: See `pin`.
    """

    def __init__(
        self,
        world_size: int,
        pin: Callable[[list[Any]], None],
        unpin: Callable[[list[Any]], None],
    ) -> None:
        self._world_size = world_size
        self._pin, self._unpin = pin, unpin
        self._sent: dict[int, Job] = {}
        self._num_left: dict[int, int] = {}  # by job, workers that have not ended it
        self._pinned: dict[int, list[Any]] = {}  # for copies to the host, by the list itself
        self._given_up: dict[str, list[Any]] = {}  # blocks that loads go on writing, by request
        self._promised: set[str] = set()
        self._loading: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether the workers have ended all that they were sent."""
        return not self._sent

    @property
    def num_given_up(self) -> int:
        """Blocks that are free but for a load that nobody waits for."""
        return sum(map(len, self._given_up.values())) if self._given_up else 0

    def is_loading(self, req_id: str) -> bool:
        """Whether workers have been sent a load of the request, and have not ended it."""
        return req_id in self._loading

    def is_awaited(self, req_id: str) -> bool:
        """Whether vLLM waits for such a load."""
        return req_id in self._loading and req_id not in self._given_up

    def pin(self, blocks: list[Any]) -> None:
        """Keep blocks that a copy to the host is to read."""
        if blocks:
            self._pin(blocks)
            self._pinned[id(blocks)] = blocks

    def unpin(self, blocks: list[Any]) -> None:
        """Keep them no longer; call with the same list."""
        if self._pinned.pop(id(blocks), None) is not None:
            self._unpin(blocks)

    def unpin_all(self) -> None:
        """No copy to the host is of use any more, whatever it reads."""
        while self._pinned:
            _, blocks = self._pinned.popitem()
            self._unpin(blocks)

    def promise(self, req_id: str) -> None:
        """vLLM waits for a load of the request from now on."""
        self._promised.add(req_id)

    def take_unsent(self) -> set[str]:
        """Requests whose loads were promised and not sent. Call between two steps."""
        unsent, self._promised = self._promised, set()
        return unsent

    def send(self, jobs: Sequence[Job]) -> None:
        """The workers get these jobs with the next step."""
        for job in jobs:
            self._sent[job.job_id] = job
            self._num_left[job.job_id] = self._world_size
            if job.is_load:
                self._promised.discard(job.req_id)
                self._loading.add(job.req_id)

    def give_up(self, req_id: str, blocks: list[Any]) -> None:
        """vLLM waits no longer for the load of the request, which goes on writing its blocks."""
        if self.is_awaited(req_id):
            self._pin(blocks)
            self._given_up[req_id] = blocks

    def lend_given_up(self, lent: dict[str, list[Any]]) -> None:
        """Unpin the blocks that given up loads write. They are to be given up again at once.

        Args:
            lent: Gets them, by request.
        """
        while self._given_up:
            req_id, blocks = next(iter(self._given_up.items()))
            lent[req_id] = blocks
            del self._given_up[req_id]
            self._unpin(blocks)

    def book(self, report: Report) -> set[str]:
        """Book what has ended; returns the requests whose given up loads are over."""
        over = set()
        for job_id, count in report.num_ended.items():
            if job_id not in self._sent:
                continue
            self._num_left[job_id] -= count
            if self._num_left[job_id] > 0:
                continue
            job = self._sent.pop(job_id)
            del self._num_left[job_id]
            if not job.is_load:
                continue
            self._loading.discard(job.req_id)
            if job.req_id in self._given_up:
                self._unpin(self._given_up.pop(job.req_id))
                over.add(job.req_id)
        return over
