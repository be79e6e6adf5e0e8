"""What `policy="attain"` knows of the decodes of a step, and its account for the lost."""

from __future__ import annotations

from dataclasses import dataclass

from sola_sched.state import BoolArray, FloatArray, IntArray

#: Best-effort credit never exceeds this many seconds: no burst of lost requests.
_MAX_CREDIT_S = 0.5


@dataclass(slots=True)
class Decodes:
    """The decoding requests of a step, all arrays aligned.

    Attributes:
        rows: Rows of the table.
        ahead: Output tokens in flight.
        ctx: KV tokens of each.
        bank_s: Time until its next token is due, seconds; < 0 if it is behind its schedule.
        sustain_s: Longest mean step that still meets TPOT at the predicted end, seconds.
        allowed_s: Longest next step that keeps (or brings) the request on course, seconds.
        lost: Whether it missed an SLO or cannot meet one any more.
    """

    rows: IntArray
    ahead: IntArray
    ctx: IntArray
    bank_s: FloatArray
    sustain_s: FloatArray
    allowed_s: FloatArray
    lost: BoolArray


@dataclass(slots=True)
class BestEffort:
    """The guaranteed share of engine time of requests that have lost their SLO.

    Attributes:
        share: In [0, 1).
        credit_s: Engine time earned and not yet spent, seconds.
        is_blocked: The oldest lost request has credit but neither slot nor memory: nobody else
            is admitted until it has.
    """

    share: float
    credit_s: float = 0.0
    is_blocked: bool = False

    def forget(self) -> None:
        """Nobody is lost: credit is earned by those who wait for it, not kept for a burst."""
        self.credit_s = min(self.credit_s, 0.0)

    def earn(self, elapsed_s: float) -> None:
        """Book the share of the engine time that has passed while a lost request was there."""
        self.credit_s = min(_MAX_CREDIT_S, self.credit_s + self.share * elapsed_s)

    def received(self, seconds: float) -> None:
        """Book service from what others left over: the share is a minimum, not an extra."""
        self.credit_s = max(self.credit_s - seconds, -_MAX_CREDIT_S)

    @property
    def is_full(self) -> bool:
        """Whether no more credit can be earned: it has been waiting to be spent."""
        return self.credit_s >= 0.99 * _MAX_CREDIT_S
