"""The last measured steps of each kind.

One ring per kind: an hour of decode-only steps must not push out the last prefill. A row is the
features of a step, in the order of `fit.FEATURES`, and its time in seconds.
"""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import FloatArray, IntArray, compiled
from sola_sched.cost.fit import NUM_FEATURES

NUM_KINDS = 3


def new_memory(capacity: int) -> FloatArray:
    """Room for so many steps of each kind, [kinds, steps, features + 1]."""
    return np.zeros((NUM_KINDS, capacity, NUM_FEATURES + 1))


@compiled
def remember(memory, num_added, kind, num_decodes, ctx, tokens, squares, products, time_s):
    """Keep one step.

    Args:
        memory: From `new_memory`.
        num_added: Steps of each kind so far.
        The rest: as in `StepShape`, and its time.
    """
    row = memory[kind, num_added[kind] % memory.shape[1]]
    row[0], row[1], row[2], row[3], row[4] = products, squares, tokens, num_decodes, ctx
    row[5], row[6], row[7] = 1.0, 1.0 if tokens > 0 else 0.0, 1.0 if num_decodes > 0 else 0.0
    row[8] = time_s
    num_added[kind] += 1


def has_forgotten(memory: FloatArray, num_added: IntArray) -> bool:
    """True once a step has been overwritten."""
    return bool(num_added.max() > memory.shape[1])


def all_steps(memory: FloatArray, num_added: IntArray) -> tuple[FloatArray, FloatArray]:
    """Features [n, NUM_FEATURES] and times [n] of every step kept."""
    kept = [rows[:count] for rows, count in zip(memory, num_added.tolist(), strict=True)]
    return _features_and_times(np.concatenate(kept))


def last_steps(
    memory: FloatArray, num_added: IntArray, kind: int, count: int
) -> tuple[FloatArray, FloatArray]:
    """Features and times of at most `count` newest steps of a kind, oldest first."""
    rows, num, capacity = memory[kind], int(num_added[kind]), memory.shape[1]
    newest = np.arange(max(0, num - min(count, capacity)), num) % capacity
    return _features_and_times(rows[newest])


def _features_and_times(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    return rows[:, :-1], rows[:, -1]
