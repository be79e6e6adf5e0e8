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


def add_to(rows: IntArray, amount: int, column: IntArray) -> None:
    """Add to the column, in each of the rows."""
    for row in rows:
        column[row] += amount


def deliver(
    rows: IntArray,
    num_tokens: IntArray,
    now_s: float,
    num_output: IntArray,
    first_token_s: FloatArray,
    last_token_s: FloatArray,
) -> None:
    """Each row has received so many tokens now: one if no numbers are given."""
    for place in range(len(rows)):
        row = rows[place]
        num_output[row] += num_tokens[place] if len(num_tokens) else 1
        last_token_s[row] = now_s
        if first_token_s[row] != first_token_s[row]:  # NaN: it is the first
            first_token_s[row] = now_s


@functools.cache
def load() -> SimpleNamespace:
    """The loops by name; call before the first step."""
    return compile_loops(sum_tokens, least, add_to, deliver)
