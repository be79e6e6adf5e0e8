"""The loops of the state over the requests of a step; rows are places in the table's records."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import IntArray, Records, compiled, entry


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


@entry
def begin(requests: Records, decodes: IntArray, sampled: IntArray) -> int:
    """A step samples a token of each row; prompt and output tokens of those that decode, in sum."""
    return _begin(requests, decodes, sampled)


@entry
def begin_and_end(
    requests: Records,
    decodes: IntArray,
    sampled: IntArray,
    ended: IntArray,
    more: IntArray,
    gone: IntArray,
    now_s: float,
) -> int:
    """As `begin` of a step; then the oldest step in flight, perhaps the same one, has ended.

    That one has brought each row of `ended` and `more` a token now, but for those that are `gone`;
    no tokens if `now_s` is NaN.
    """
    total = _begin(requests, decodes, sampled)
    for place in range(len(ended) + len(more)):
        row = ended[place] if place < len(ended) else more[place - len(ended)]
        is_gone = False
        for other in gone:
            is_gone = is_gone or other == row
        if is_gone:
            continue
        request = requests[row]
        request.num_in_flight -= 1
        if now_s == now_s:
            request.num_output += 1
            request.last_token_s = now_s
            if request.first_token_s != request.first_token_s:  # NaN: it is the first
                request.first_token_s = now_s
    return total


@compiled
def _begin(requests: Records, decodes: IntArray, sampled: IntArray) -> int:
    total = 0
    for row in decodes:
        request = requests[row]
        total += request.num_prompt + request.num_output
        request.num_in_flight += 1
    for row in sampled:
        requests[row].num_in_flight += 1
    return total


@entry
def deliver(requests: Records, rows: IntArray, num_tokens: IntArray, now_s: float) -> None:
    """Each row has received so many tokens now."""
    for place in range(len(rows)):
        request = requests[rows[place]]
        request.num_output += num_tokens[place]
        request.last_token_s = now_s
        if request.first_token_s != request.first_token_s:
            request.first_token_s = now_s


def warm_up(requests: Records) -> None:
    """Compile what is not yet compiled; takes a second the first time on a machine."""
    none = np.empty(0, dtype=np.int64)
    sum_tokens(requests, none)
    shortest_tpot_s(requests, none)
    begin(requests, none, none)
    begin_and_end(requests, none, none, none, none, none, 0.0)
    deliver(requests, none, none, 0.0)
