"""What happens to the records of requests and of steps when a step begins and ends, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from sola_sched.compiled.functions import FloatArray, IntArray, Records, compiled, entry
from sola_sched.core.table import DECODE, WAITING
from sola_sched.cost.online import NOTHING, take_in
from sola_sched.cost.times import decode_s, step_s

#: Weight of the newest step in the running averages.
_AVERAGING = 0.05

#: A step in flight.
#:
#: - scheduled_s, predicted_s: when it was scheduled, and how long it is expected to take.
#: - num_decodes, num_ending, num_chunks: requests that decode, whose prefill ends, that prefill.
#: - num_gone: of the first two, those that have ended since.
#: - ctx, tokens, squares, products: as in `StepShape`.
#: - is_known: whether these are all that sample.
STEP = np.dtype([
    ("scheduled_s", "f8"), ("predicted_s", "f8"), ("num_decodes", "i8"), ("num_ending", "i8"),
    ("num_chunks", "i8"), ("num_gone", "i8"), ("ctx", "i8"), ("tokens", "i8"), ("squares", "f8"),
    ("products", "f8"), ("is_known", "?"),
], align=True)  # fmt: skip

#: Lists of a step: rows that sample, first those that decode; rows that prefill, and their tokens.
#: -1 stands for a request that is not there any more: its row may be another one's by now.
SAMPLED, CHUNKS, TOKENS = range(3)
NUM_LISTS = 3

#: What spans steps.
#:
#: - first, count: place of the oldest step in flight in the ring, and how many there are.
#: - last_update_s: when the last step ended, or the engine began to compute after it was idle.
#: - elapsed_s: measured engine time since it was last asked for.
#: - prefill_share, accepted_per_decode: as in `StepState`.
#: - free_s: when the steps in flight are expected to have ended; -inf without any.
#: - num_expected: requests that sample in the oldest step in flight and have not ended since; -1
#:   where that is not known.
CLOCK = np.dtype([
    ("last_update_s", "f8"), ("elapsed_s", "f8"), ("prefill_share", "f8"),
    ("accepted_per_decode", "f8"), ("free_s", "f8"), ("num_expected", "i8"), ("first", "i8"),
    ("count", "i8"),
], align=True)  # fmt: skip


@entry
def begin_step(
    requests: Records,
    num_in_phase: IntArray,
    clock: Records,
    steps: Records,
    lists: IntArray,
    cost: Records,
    decodes: IntArray,
    prefills: IntArray,
    tokens: IntArray,
    now_s: float,
) -> int:
    """A step was scheduled; of so many requests it ends the prefill.

    Args:
        requests, num_in_phase: Of the table.
        clock: One `CLOCK`. steps, lists: The ring.
        cost: As `CostModel.model`.
        decodes, prefills, tokens: As in `StateMonitor.scheduled`.
        now_s: When.
    """
    at = clock[0]
    place = (at.first + at.count) % len(steps)
    step, sampled = steps[place], lists[place, SAMPLED]
    step.scheduled_s, step.is_known, step.num_gone = now_s, True, 0
    step.num_decodes, step.ctx = len(decodes), 0
    for i in range(len(decodes)):
        request = requests[decodes[i]]
        step.ctx += request.num_prompt + request.num_output
        request.num_in_flight += 1
        sampled[i] = decodes[i]
    _compute_chunks(requests, num_in_phase, step, lists[place], prefills, tokens)
    step.predicted_s = 0.0
    if cost[0].is_ready:
        step.predicted_s = step_s(
            cost[0], step.num_decodes, step.ctx, step.tokens, step.squares, step.products
        )
    at.count += 1
    _look_ahead(at, steps)
    num_ending: int = step.num_ending
    return num_ending


@compiled
def _compute_chunks(requests, num_in_phase, step, lists, prefills, tokens):
    """Count the chunks of a step as computed; whose prefill that ends, decodes from now on."""
    if len(prefills) != len(tokens):
        raise ValueError("There must be a number of tokens for each request that prefills.")
    step.num_chunks, step.num_ending, step.tokens, squares, products = len(prefills), 0, 0, 0, 0
    for i in range(len(prefills)):
        request, chunk = requests[prefills[i]], tokens[i]
        step.tokens += chunk
        squares += chunk * chunk
        products += chunk * request.num_computed
        request.num_computed += chunk
        lists[CHUNKS, i], lists[TOKENS, i] = prefills[i], chunk
        if request.num_computed >= request.prefill_target:
            if request.phase == WAITING:
                raise ValueError("A request that prefills must have been admitted.")
            num_in_phase[request.phase] -= 1
            num_in_phase[DECODE] += 1
            request.phase = DECODE
            request.num_in_flight += 1
            lists[SAMPLED, step.num_decodes + step.num_ending] = prefills[i]
            step.num_ending += 1
    step.squares, step.products = float(squares), float(products)


@entry
def end_step(
    requests: Records,
    clock: Records,
    steps: Records,
    lists: IntArray,
    cost: Records,
    memory: FloatArray,
    now_s: float,
    brings_one: bool,
    rows: IntArray,
    num_tokens: IntArray,
) -> Any:
    """The oldest step in flight has ended.

    Args:
        requests ... cost: As in `begin_step`. memory: `CostModel.memory`.
        now_s: When.
        brings_one: It has brought each of its requests a token.
        rows, num_tokens: Those that have received tokens, each once, and how many; if not so.

    Returns:
        How long it took, and what is due then, as of `take_in`; unless that is nothing,
        `note_share` is to be called after it.
    """
    at = clock[0]
    step, sampled = steps[at.first], lists[at.first, SAMPLED]
    for i in range(step.num_decodes + step.num_ending):
        if sampled[i] >= 0:
            request = requests[sampled[i]]
            request.num_in_flight -= 1
            if brings_one:
                _deliver(request, 1, now_s)
    at.first, at.count = (at.first + 1) % len(steps), at.count - 1
    elapsed_s, at.last_update_s = now_s - at.last_update_s, now_s
    at.elapsed_s += elapsed_s
    due = NOTHING
    if step.num_decodes or step.tokens:
        due = take_in(
            cost[0], memory, step.num_decodes, step.ctx, step.tokens, step.squares, step.products,
            elapsed_s,
        )  # fmt: skip
        if due == NOTHING:
            _note_share(at, step, cost[0])
    if not brings_one:
        _deliver_all(requests, at, step, rows, num_tokens, now_s)
    _look_ahead(at, steps)
    return elapsed_s, due


@compiled
def _deliver_all(requests, at, step, rows, num_tokens, now_s):
    """Each of these has received its tokens."""
    if len(rows) != len(num_tokens):
        raise ValueError("There must be a number of tokens for each request that received some.")
    total = 0
    for i in range(len(rows)):
        _deliver(requests[rows[i]], num_tokens[i], now_s)
        total += num_tokens[i]
    if len(rows) and step.num_decodes:
        mean = total / len(rows)
        at.accepted_per_decode += _AVERAGING * (max(1.0, mean) - at.accepted_per_decode)


@compiled
def _deliver(request, num_tokens, now_s):
    """A request has received tokens."""
    request.num_output += num_tokens
    request.last_token_s = now_s
    if request.first_token_s != request.first_token_s:  # NaN: it is the first
        request.first_token_s = now_s


@entry
def note_share(clock: Records, steps: Records, cost: Records) -> None:
    """Count the share of prefills of the step that has ended last."""
    at = clock[0]
    _note_share(at, steps[(at.first - 1) % len(steps)], cost[0])


@compiled
def _note_share(at, step, cost):
    share = 0.0
    if step.tokens and step.predicted_s > 0.0:
        share = max(0.0, 1.0 - decode_s(cost, step.num_decodes, step.ctx) / step.predicted_s)
    at.prefill_share += _AVERAGING * (share - at.prefill_share)


@entry
def forget_row(clock: Records, steps: Records, lists: IntArray, row: int) -> None:
    """The request in this row is not there any more."""
    at = clock[0]
    for i in range(at.count):
        place = (at.first + i) % len(steps)
        step, sampled, chunks = steps[place], lists[place, SAMPLED], lists[place, CHUNKS]
        for j in range(step.num_decodes + step.num_ending):
            if sampled[j] == row:
                sampled[j] = -1
                step.num_gone += 1
        for j in range(step.num_chunks):
            if chunks[j] == row:
                chunks[j] = -1
    _look_ahead(at, steps)


@entry
def look_ahead(clock: Records, steps: Records) -> None:
    """Renew `free_s` and `num_expected` after a change of the other fields."""
    _look_ahead(clock[0], steps)


@compiled
def _look_ahead(at, steps):
    at.num_expected, at.free_s = -1, -np.inf
    if not at.count:
        return
    oldest = steps[at.first]
    if oldest.is_known:
        at.num_expected = oldest.num_decodes + oldest.num_ending - oldest.num_gone
    at.free_s = max(at.last_update_s, oldest.scheduled_s)
    for i in range(at.count):
        at.free_s += steps[(at.first + i) % len(steps)].predicted_s
