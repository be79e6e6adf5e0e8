"""Sums over rows of the table, compiled."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import IntArray, Records, entry


@entry
def sum_tokens(requests: Records, rows: IntArray) -> int:
    """Prompt and output tokens of the rows, in sum."""
    total = 0
    for row in rows:
        total += requests[row].num_prompt + requests[row].num_output
    return total


@entry
def shortest_tpot_s(requests: Records, rows: IntArray) -> float:
    """The shortest TPOT target of the rows, inf for none."""
    shortest_s = np.inf
    for row in rows:
        shortest_s = min(shortest_s, requests[row].tpot_s)
    return shortest_s


def warm_up(requests: Records) -> None:
    """Compile what is not yet compiled."""
    none = np.empty(0, dtype=np.int64)
    sum_tokens(requests, none)
    shortest_tpot_s(requests, none)
