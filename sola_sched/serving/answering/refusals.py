"""The replicas that do not take one request, and what its client is told when none does."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus

from sola_sched.serving.answering.answers import FAILURES, Answer
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
    """

    def __init__(self, call: Call, replicas: Replicas, counts: Counter[str]) -> None:
        self.by: set[Replica] = set()
        self._full: Answer | None = None  # of those that had no room, who asks to come back soonest
        self._full_at: set[Replica] = set()
        self._too_long: Answer | None = None
        self._longer: set[Replica] = set()  # take longer prompts than who has answered so
        self._unknown: Answer | None = None
        self._replicas, self._counts = replicas, counts
        self._is_stored = call.stored_id is not None

    @property
    def answer(self) -> Answer | None:
        """What the client gets when there is no other replica; None if it should wait for one.

        That a prompt is too long is only said once all those have answered that take longer ones.
        """
        if self._full is not None:
            return self._full
        if any(not each.has_left for each in self._longer - self.by):
            return None
        return self._too_long or self._unknown

    def may_go_on(self, status: int) -> bool:
        """Whether another replica may be asked after an answer with this status."""
        is_unknown = status == HTTPStatus.NOT_FOUND and self._is_stored
        return status in FAILURES or status == HTTPStatus.SERVICE_UNAVAILABLE or is_unknown

    def take(self, replica: Replica, answer: Answer, has_started: bool, num_prompt: int) -> bool:
        """Whether an answer is a refusal, which its client only gets if no other replica serves it.

        Args:
            num_prompt: What the length of its prompt is guessed to be, tokens.
            has_started: Whether the client has had something of its answer.
        """
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._counts["refused"] += 1
            self.by.add(replica)
            self._full_at.add(replica)
            if self._full is None or answer.retry_after_s < self._full.retry_after_s:
                self._full = answer
            return True
        if answer.status == HTTPStatus.NOT_FOUND and self._is_stored:
            self.by.add(replica)  # another one may have it
            self._unknown = self._unknown or answer
            return True
        if not has_started and answer.is_of_length:
            # How long a prompt is was guessed: it may have come to a replica that is too small.
            longer = self._replicas.with_longer_context(replica, num_prompt)
            left = longer - self.by
            if left or longer & self._full_at:
                self._counts["retried"] += bool(left)
                self.by |= set(self._replicas) - left
                self._too_long, self._longer = self._too_long or answer, longer
                return True
        return False
