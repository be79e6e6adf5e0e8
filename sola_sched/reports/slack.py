"""How long live requests have until their next deadline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sola_sched.core.state import FREE, RequestTable

#: Upper ends of all kinds but the last two, seconds.
_ENDS_S = (0.0, 0.1, 1.0, 10.0)
#: Kinds of requests, the most urgent first: too late, within so long, later, without a deadline.
KINDS = ("late", "0.1s", "1s", "10s", "later", "none")


def slack_s(table: RequestTable, now_s: float) -> NDArray[np.float64]:
    """Of each live request the time until its next deadline, seconds; inf where it has none.

    Before the first token that is when it is due. Then it is when the next token is due at the pace
    of the TPOT target: a request that is late for that may make it good, as TPOT is a mean. A
    deadline for the whole answer counts besides.
    """
    (rows,) = (table.phase != FREE).nonzero()
    first_s = table.first_token_s[rows]
    with np.errstate(invalid="ignore"):  # no target and no output: inf x 0
        next_due_s = first_s + table.tpot_s[rows] * table.num_output[rows]
    due_s = np.where(np.isnan(first_s), table.due_s[rows], next_due_s)
    slack: NDArray[np.float64] = np.fmin(due_s, table.e2e_due_s[rows]) - now_s
    return slack


def counts_by_slack(table: RequestTable, now_s: float) -> list[int]:
    """Live requests of each of `KINDS`."""
    slack = slack_s(table, now_s)
    kinds = np.searchsorted(_ENDS_S, slack, side="right")
    kinds[np.isinf(slack)] = len(KINDS) - 1
    counts: list[int] = np.bincount(kinds, minlength=len(KINDS)).tolist()
    return counts
