"""The boundary between this package and the engine: what fails here must not end the engine.

An engine core ends with every request in flight when its scheduler raises. So whatever is raised
while the state is observed, a step is planned or its outcome is booked stops at a `Guard`: it is
logged and counted, the state counts as lost until it has been built anew from the engine's own
queues, and the steps until then are the engine's own. An engine that works without us is better
than one that keeps failing with us: after repeated failures the guard steps aside for good.

What is only too slow ends by itself, as long prompts do. So after repeated slow plans none is made
for a while, then one is tried; as long as it is slow again, the next pause is twice as long.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

#: Failures that are borne, each forgiven after so many steps without another.
PATIENCE, FORGIVEN_AFTER_STEPS = 5, 500
#: Steps without plans after plans that were too slow: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096


class Guard:
    """Takes the failures of one scheduler.

    Args:
        logger: Where the first failure of a kind is logged, with its traceback.

    Attributes:
        is_lost: The state no longer follows the engine: nothing may be read from it or booked.
        is_aside: For good; `is_lost` then stays true.
        is_pausing: No plan is to be made in this step, since those before it were too slow.
        num_failures: By what was being done; too long plans included.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.is_lost = self.is_aside = self.is_pausing = False
        self.num_failures: Counter[str] = Counter()
        self._known: set[tuple[str, type[BaseException]]] = set()
        self._num_steps = 0
        self._failures = _Unforgiven()
        self._of_swapping = _Unforgiven()
        self._slow = _Unforgiven()
        self._pause, self._plans_again_at = FIRST_PAUSE, 0

    def step(self) -> None:
        """Another step begins."""
        self._num_steps += 1
        self.is_pausing = self._num_steps < self._plans_again_at

    def book(self, doing: str, action: Callable[..., None], *args: Any) -> None:
        """Let the state follow an event of the engine; a state that is lost follows nothing.

        Args:
            doing: As for `failed`.
            action: Books the event; called with `args`.
            args: What `action` gets.
        """
        if self.is_lost:
            return
        try:
            action(*args)
        except Exception as error:
            self.failed(doing, error)

    def failed(self, doing: str, error: BaseException) -> None:
        """Something was raised: the state is lost.

        Args:
            doing: What was being done, as in "planning a step".
            error: What was raised.
        """
        self.is_lost = True
        self._tell(
            doing,
            error,
            "requests go on in vLLM's own order until the state has been built anew",
        )
        self._count(doing, repr(error))

    def failed_beside(
        self, doing: str, error: BaseException, what_follows: str = "scheduling goes on as before"
    ) -> None:
        """As `failed`, where the state does not depend on it: planning goes on.

        Args:
            doing: As for `failed`.
            error: What was raised.
            what_follows: For the log.
        """
        self._tell(doing, error, what_follows)
        self.num_failures[doing] += 1

    def swapping_failed(self, doing: str, error: BaseException) -> bool:
        """As `failed_beside`, in the swapping of KV; whether it may go on."""
        self.failed_beside(
            doing, error, "all copies on the host are dropped, what they held is computed again"
        )
        if self._of_swapping.add(self._num_steps) <= PATIENCE:
            return True
        self._logger.error(
            "sola_sched ends swapping for good after failures, the last while %s: %r. Preempted "
            "requests are computed again, scheduling goes on as before; restart the engine to "
            "swap again.",
            doing,
            error,
        )
        return False

    def _tell(self, doing: str, error: BaseException, what_follows: str) -> None:
        kind = doing, type(error)
        if kind not in self._known:
            self._known.add(kind)
            self._logger.error(
                "sola_sched: %s failed; %s. Further failures of this kind are only counted.",
                doing,
                what_follows,
                exc_info=error,
            )

    def took_too_long(self, doing: str, seconds: float, limit_s: float) -> None:
        """Something took longer than its limit; what came of it may still be used."""
        if not self.num_failures[doing]:
            self._logger.warning(
                "sola_sched: %s was too slow: it took %.3f s of processor time, more than the "
                "limit of %g s. Further times are only counted.",
                doing,
                seconds,
                limit_s,
            )
        self.num_failures[doing] += 1
        if self._slow.num(self._num_steps) == 0.0:
            self._pause = FIRST_PAUSE
        if self._slow.add(self._num_steps) > PATIENCE:
            level = logging.WARNING if self._pause < LONGEST_PAUSE else logging.DEBUG
            self._logger.log(
                level,
                "sola_sched: after %d times that %s was too slow, the next %d steps are in vLLM's "
                "own order.",
                self.num_failures[doing],
                doing,
                self._pause,
            )
            self._plans_again_at, self.is_pausing = self._num_steps + self._pause, True
            # The pause forgives nothing: the next slow one begins a longer pause.
            self._slow.put_off(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def restored(self) -> None:
        """The state has been built anew."""
        self.is_lost = self.is_aside

    def _count(self, doing: str, problem: str) -> None:
        self.num_failures[doing] += 1
        if self._failures.add(self._num_steps) > PATIENCE and not self.is_aside:
            self.is_lost = self.is_aside = True
            self._logger.error(
                "sola_sched steps aside for good after %d failures, the last while %s: %s. vLLM's "
                "own scheduling goes on; restart the engine to switch sola_sched on again.",
                self.num_failures.total(),
                doing,
                problem,
            )


class _Unforgiven:
    """How often something has happened, each time forgiven after so many steps without another."""

    def __init__(self) -> None:
        self._count, self._at_step = 0.0, 0

    def num(self, step: int) -> float:
        """Those that are not forgiven by this step."""
        return max(0.0, self._count - (step - self._at_step) / FORGIVEN_AFTER_STEPS)

    def add(self, step: int) -> float:
        """One more; returns how many there are. More than ends patience is not counted."""
        self._count, self._at_step = min(self.num(step), float(PATIENCE)) + 1.0, step
        return self._count

    def put_off(self, num_steps: int) -> None:
        """The next steps forgive nothing."""
        self._at_step += num_steps
