"""Whose turn is next among the engines that share a GPU. Pure: numbers in, a choice out.

The most urgent goes first, unless somebody is owed its guaranteed share. What an engine is owed is
counted while it wants the GPU: its share of every turn in the meantime, less its own turns. An
engine that wants nothing is owed nothing, so that unused share is lent and not saved up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Seconds that an engine may be owed before it goes first: room for the order by urgency.
GRACE_S = 0.1


@dataclass(frozen=True, slots=True)
class Claim:
    """An engine that wants the next turn.

    Attributes:
        slot: Its number in the group.
        urgency: The smaller, the sooner; see `urgency.py`.
        since_s: Since when it has wanted a turn, seconds; decides between equals.
        owed_s: Seconds of the GPU that it is owed.
    """

    slot: int
    urgency: float
    since_s: float
    owed_s: float


def first(claims: Sequence[Claim]) -> Claim | None:
    """The claim that is served next, None if there is none.

    With n engines, steps of at most d seconds and shares that sum up to at most 1, an engine that
    wants the GPU all the time is never owed more than ``GRACE_S + n * d``: of any period of T
    seconds it gets at least ``share * T`` less that and less `GRACE_S`.
    """
    if not claims:
        return None
    most_owed = max(claims, key=lambda claim: claim.owed_s)
    if most_owed.owed_s >= GRACE_S:
        return most_owed
    return min(claims, key=lambda claim: (claim.urgency, claim.since_s))


def settle(
    holder: int, seconds: float, owed_s: Mapping[int, float], shares: Mapping[int, float]
) -> dict[int, float]:
    """What each is owed after a turn.

    Args:
        holder: Slot that had the turn.
        seconds: How long.
        owed_s: What the holder, and all who waited meanwhile, were owed before.
        shares: Their guaranteed shares, in [0, 1).
    """
    after = {slot: owed + shares[slot] * seconds for slot, owed in owed_s.items()}
    # What was lent to the holder is forgotten beyond the grace, or it would pay for idle times.
    after[holder] = max(after[holder] - seconds, -GRACE_S)
    return after
