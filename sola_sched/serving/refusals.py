"""The replicas that do not take one request, and what its client is told when none does."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus

from sola_sched.serving.answers import FAILURES, Answer
from sola_sched.serving.call import Call
from sola_sched.serving.replicas import Replica, Replicas


class Refusals:
    """Of one request.

    Args:
        call: The request.
        replicas: Where it may go.
        counts: Of what happened, by name.

    Attributes:
        by: The replicas that are not asked again.
        answer: What the client gets when there is no other.
    """

    def __init__(self, call: Call, replicas: Replicas, counts: Counter[str]) -> None:
        self.by: set[Replica] = set()
        self.answer: Answer | None = None
        self._replicas, self._counts = replicas, counts
        self._is_stored = call.stored_id is not None

    def may_go_on(self, status: int) -> bool:
        """Whether another replica may be asked after an answer with this status."""
        is_unknown = status == HTTPStatus.NOT_FOUND and self._is_stored
        return status in FAILURES or status == HTTPStatus.SERVICE_UNAVAILABLE or is_unknown

    def take(self, replica: Replica, answer: Answer, has_started: bool) -> bool:
        """Whether an answer is a refusal after which another replica is asked.

        Args:
            has_started: Whether the client has had something of its answer.
        """
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._counts["refused"] += 1
            self.by.add(replica)
            if self.answer is None or answer.retry_after_s < self.answer.retry_after_s:
                self.answer = answer
            return True
        if answer.status == HTTPStatus.NOT_FOUND and self._is_stored:
            self.by.add(replica)  # another one may have it
            self.answer = self.answer or answer
            return True
        if not has_started and answer.is_of_length:
            # How long a prompt is was guessed: it may have come to a replica that is too small.
            longer = self._replicas.with_longer_context(replica) - self.by
            if longer:
                self._counts["retried"] += 1
                self.by |= set(self._replicas) - longer
                self.answer = self.answer or answer
                return True
        return False
