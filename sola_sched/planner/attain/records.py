"""What the compiled functions of `attain` work on: one `Step`, the argument of them all."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any, NamedTuple

import numpy as np

from sola_sched.compiled.functions import IntArray, Record, Records, compiled, records_of
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner.attain.tuning import AttainTuning

#: What is the same for all requests of a step. From `now_s` on what `StepState` and `CostModel`
#: say of it; from `num_decodes` on what the stages find, seconds and tokens:
#:
#: - max_chunk: 0 for no limit. keeps_kv: whether displaced requests may find their KV swapped.
#: - a0 ... mixed, gamma: coefficients and factors of the step times; see `cost.times`.
#: - num_came ... mean_output: recent traffic, as `RecentTraffic.means`.
#: - num_decodes, num_prefills, num_started: requests in `decodes` and `prefills`; the first
#:   `num_started` of these hold a slot.
#: - lowest: the lowest rank of all.
#: - num_alive, ctx_alive, decode_s: of the decodes that are not lost: how many, their KV tokens,
#:   and the time of a step of them alone.
#: - slack_s, bear_s, pace_s: the longest next step that keeps, or brings, all of them on course;
#:   the longest bare step that all of them sustain; the least of their `token_s`. inf without any.
#: - mixed_s: time of a step of them and a chunk, but for the chunk.
#: - has_room: of `held.note_room`. is_holding: decodes marked so sit out.
#: - num_taking, ctx_taking, taking_s, least_s: as num_alive, ctx_alive, decode_s and mixed_s, of
#:   the decodes that take part.
#: - num_feasible, num_hopeless, num_kept: prefills that are so; those with a slot that are
#:   feasible.
#: - num_jobs: prefills that can be on time. limit_s, num_on_time, can_wait_s, upper_limit_s,
#:   upper_rank: of `pace`.
#: - num_served, num_offered, chunk, has_backlog: of `admission`.
#: - lost_run ... starting: of `best_effort`.
#: - num_run, num_admit, num_preempt, num_reject, budget: of the plan; num_run is -1 for all as
#:   they stand.
STEP = np.dtype([
    ("now_s", "f8"), ("elapsed_s", "f8"), ("per_step", "f8"), ("prefill_share", "f8"),
    ("max_num_tokens", "i8"), ("max_num_running", "i8"), ("num_free_blocks", "i8"),
    ("num_blocks", "i8"), ("block_size", "i8"), ("tokens_per_decode", "i8"), ("max_chunk", "i8"),
    ("chunks_prefills", "?"), ("has_e2e", "?"), ("has_ranks", "?"), ("keeps_kv", "?"),
    ("a0", "f8"), ("b0", "f8"), ("c0", "f8"), ("a1", "f8"), ("b1", "f8"), ("c1", "f8"),
    ("d0", "f8"), ("mixed", "f8"), ("gamma", "f8", (3,)),
    ("num_came", "i8"), ("first_came_s", "f8"), ("last_came_s", "f8"),
    ("mean_prompt", "f8"), ("mean_output", "f8"),
    ("num_running", "i8"), ("num_waiting", "i8"),
    ("num_decodes", "i8"), ("num_prefills", "i8"), ("num_started", "i8"), ("lowest", "i8"),
    ("num_alive", "i8"), ("ctx_alive", "f8"), ("decode_s", "f8"), ("slack_s", "f8"),
    ("bear_s", "f8"), ("pace_s", "f8"), ("mixed_s", "f8"), ("has_room", "?"), ("is_holding", "?"),
    ("num_taking", "i8"), ("ctx_taking", "f8"), ("taking_s", "f8"), ("least_s", "f8"),
    ("num_feasible", "i8"), ("num_hopeless", "i8"), ("num_kept", "i8"),
    ("num_jobs", "i8"), ("num_near", "i8"),
    ("num_order", "i8"), ("limit_s", "f8"), ("num_on_time", "i8"),
    ("can_wait_s", "f8"), ("upper_limit_s", "f8"), ("upper_rank", "i8"),
    ("num_served", "i8"), ("num_offered", "i8"), ("chunk", "i8"), ("has_backlog", "?"),
    ("lost_run", "i8"), ("num_chosen", "i8"), ("lost_tokens", "i8"), ("is_alone", "?"),
    ("is_blocked", "?"), ("spare_s", "f8"), ("received_s", "f8"), ("room", "i8"), ("slots", "i8"),
    ("free", "f8"), ("lost_slots", "i8"), ("lost_blocks", "f8"), ("num_starts", "i8"),
    ("starting", "f8"),
    ("num_run", "i8"), ("num_admit", "i8"), ("num_preempt", "i8"), ("num_reject", "i8"),
    ("budget", "i8"),
], align=True)  # fmt: skip
#: Recent traffic, and what seldom changes.
TRAFFIC = ["num_came", "first_came_s", "last_came_s", "mean_prompt", "mean_output"]
LIMITS = [
    "max_num_tokens", "max_num_running", "num_blocks", "block_size", "tokens_per_decode",
    "max_chunk", "chunks_prefills",
]  # fmt: skip

#: A decode of the step; times in seconds.
#:
#: - row, ahead, ctx: row of the table, output tokens in flight, KV tokens.
#: - left: predicted output tokens after those in flight, >= 1.
#: - bank_s: time until the next token is due; < 0 behind the schedule.
#: - token_s: target for a step: TPOT x tokens of a step.
#: - sustain_s: longest mean step with which it meets TPOT at its predicted end.
#: - is_lost: it missed a target or cannot meet one any more. is_safe: lost, and nobody displaces
#:   it in this step. is_held: it sits the step out, if any that are not lost do.
DECODE = np.dtype([
    ("row", "i8"), ("ahead", "i8"), ("ctx", "i8"), ("left", "f8"), ("bank_s", "f8"),
    ("token_s", "f8"), ("sustain_s", "f8"), ("is_lost", "?"), ("is_safe", "?"), ("is_held", "?"),
], align=True)  # fmt: skip

#: A request without a first token (again): those with a slot come first, then those that wait.
#:
#: - row, rank: row of the table, rank by class and service.
#: - left: predicted output tokens, where they matter.
#: - due_s: time until it must end; inf without a target.
#: - new, has: tokens to compute, >= 1, and computed or expected in a cache.
#: - chunk: of `new`, what one step may compute.
#: - service_s: what computing the rest adds to steps that run anyway; weight_s: that for what the
#:   request is worth.
#: - is_feasible: it can still end in time; false without a target.
#: - is_hopeless: it waits for its first token and cannot get it in time any more.
PREFILL = np.dtype([
    ("row", "i8"), ("rank", "i8"), ("left", "f8"), ("due_s", "f8"), ("new", "f8"), ("has", "f8"),
    ("chunk", "f8"), ("service_s", "f8"), ("weight_s", "f8"), ("is_feasible", "?"),
    ("is_hopeless", "?"),
], align=True)  # fmt: skip

#: Kinds of prompts whose refusals are counted apart: by tokens to compute, in powers of two, and
#: for answers that have to end in time by class of output length; more classes share counts.
NUM_SIZES, NUM_LENGTHS = 20, 16
NUM_KINDS = NUM_SIZES * NUM_LENGTHS

#: What spans steps.
#:
#: - credit_s: engine time that the lost have earned and not yet spent, at most `most_credit_s`
#:   either way. unseen_s: engine time of steps in which nobody looked whether a lost one waits.
#: - is_blocked: the oldest lost request has full credit but neither slot nor memory: nobody else
#:   starts until it has.
#: - num_refused, spared: by kind of prompt, requests refused in a row by predictions while none of
#:   the kind was computed; number of the last one that is served all the same, -1 for none.
ACCOUNT = np.dtype([
    ("credit_s", "f8"), ("unseen_s", "f8"), ("is_blocked", "?"),
    ("num_refused", "i8", (NUM_KINDS,)), ("spared", "i8", (NUM_KINDS,)),
], align=True)  # fmt: skip

#: Options of the operator and the constants of `AttainTuning`.
TUNING = np.dtype([
    ("tile", "i8"), ("keep", "f8"), ("share", "f8"), ("rejects", "?"),
    *((field.name, type(field.default)) for field in fields(AttainTuning)),
], align=True)  # fmt: skip

#: Rows of `Step.lists`.
#:
#: - Places of prefills: NEAR, the first jobs, and from `best_effort` on the first of the lost;
#:   ORDER, those jobs in the order of service; MAY, those that are served or offered; CHOSEN, those
#:   of the lost in the step.
#: - Places of decodes: LOST, the lost ones.
#: - Rows of the table: RUN to REJECT as in `StepPlan`; GIVING, those that may leave.
NEAR, ORDER, MAY, CHOSEN, LOST, RUN, ADMIT, PREEMPT, REJECT, GIVING = range(10)
NUM_LISTS = 10


class Step(NamedTuple):
    """All that a plan is made of.

    Loops over requests take its arrays out first: each access to a field that is an array counts
    references to it.

    Attributes:
        at: Its `STEP`. Python passes this and the next two as arrays of one.
        tuning: `TUNING`.
        account: `ACCOUNT`.
        requests: Records of the table, [capacity].
        decodes, prefills: `DECODE` and `PREFILL`, [capacity]; the first ones count.
        lists: [NUM_LISTS, capacity].
        lifts: By how many ranks services go first, as in `StepState`; none of none.
        likely: Equally likely output tokens left of the decodes and then the prefills, [n, 5];
            [0, 5] where memory is not short.
    """

    at: Record
    tuning: Record
    account: Record
    requests: Records
    decodes: Records
    prefills: Records
    lists: Any
    lifts: IntArray
    likely: Any


def tuning_of(config: SolaConfig, tuning: AttainTuning | None = None) -> Records:
    """One `TUNING`."""
    made = records_of(TUNING, 1)
    made[0] = (
        config.tile, 1.0 - config.safety, config.best_effort_share, config.overload == "reject",
        *astuple(tuning or AttainTuning()),
    )  # fmt: skip
    return made


def new_account() -> Records:
    """One `ACCOUNT`, before the first step."""
    account = records_of(ACCOUNT, 1)
    account["spared"] = -1
    return account


def room_for(capacity: int) -> tuple[Records, Records, Any]:
    """Decodes, prefills and lists of a `Step` for so many requests."""
    lists = np.zeros((NUM_LISTS, capacity), dtype=np.int64)
    return records_of(DECODE, capacity), records_of(PREFILL, capacity), lists


@compiled
def rank_of(lifts, request):
    """As `StepState.rank_of`."""
    if not len(lifts):
        return request.priority
    return request.priority * len(lifts) - lifts[request.service]


@compiled
def insert(line, keys, count, place, rank, key):
    """Put a place into a line by rank and then by key, behind equal ones; the new count.

    `keys` [most, 2] are those of the line, which holds no more than the first `most`.
    """
    if count == len(keys):
        if not _is_before(rank, key, keys, count - 1):
            return count
        count -= 1
    at = count
    while at > 0 and _is_before(rank, key, keys, at - 1):
        line[at], keys[at, 0], keys[at, 1] = line[at - 1], keys[at - 1, 0], keys[at - 1, 1]
        at -= 1
    line[at], keys[at, 0], keys[at, 1] = place, rank, key
    return count + 1


@compiled
def _is_before(rank, key, keys, at):
    return rank < keys[at, 0] or (rank == keys[at, 0] and key < keys[at, 1])


@compiled
def is_in(line, count, row):
    """Whether a row is among the first ones of a line."""
    for place in range(count):  # noqa: SIM110 (numba has no `any`)
        if line[place] == row:
            return True
    return False
