"""The loops of the state over the requests of a step; rows are places in columns of the table."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from sola_sched.core.compiled import FloatArray, IntArray, compile_loops


def sum_tokens(rows: IntArray, num_prompt: IntArray, num_output: IntArray) -> int:
    """Prompt and output tokens of the rows, in sum."""
    total = 0
    for row in rows:
        total += num_prompt[row] + num_output[row]
    return total


def least(rows: IntArray, column: FloatArray) -> float:
    """The least value of the rows, inf for none."""
    value = float("inf")
    for row in rows:
        value = min(value, column[row])
    return value


def begin(
    rows: IntArray, num_prompt: IntArray, num_output: IntArray, num_in_flight: IntArray
) -> int:
    """A step samples a token of each row; their prompt and output tokens, in sum."""
    total = 0
    for row in rows:
        total += num_prompt[row] + num_output[row]
        num_in_flight[row] += 1
    return total


def end(
    rows: IntArray,
    more: IntArray,
    gone: IntArray,
    now_s: float,
    num_in_flight: IntArray,
    num_output: IntArray,
    first_token_s: FloatArray,
    last_token_s: FloatArray,
) -> None:
    """The oldest step in flight has ended, and brought all rows that are not `gone` a token.

    No tokens if `now_s` is NaN.
    """
    for place in range(len(rows) + len(more)):
        row = rows[place] if place < len(rows) else more[place - len(rows)]
        is_gone = False
        for other in gone:
            is_gone = is_gone or other == row
        if is_gone:
            continue
        num_in_flight[row] -= 1
        if now_s == now_s:
            num_output[row] += 1
            last_token_s[row] = now_s
            if first_token_s[row] != first_token_s[row]:  # NaN: it is the first
                first_token_s[row] = now_s


def deliver(
    rows: IntArray,
    num_tokens: IntArray,
    now_s: float,
    num_output: IntArray,
    first_token_s: FloatArray,
    last_token_s: FloatArray,
) -> None:
    """Each row has received so many tokens now."""
    for place in range(len(rows)):
        row = rows[place]
        num_output[row] += num_tokens[place]
        last_token_s[row] = now_s
        if first_token_s[row] != first_token_s[row]:
            first_token_s[row] = now_s


@functools.cache
def load() -> SimpleNamespace:
    """The loops by name; call before the first step."""
    return compile_loops(sum_tokens, least, begin, end, deliver)
