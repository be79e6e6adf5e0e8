"""How many requests of a trace can meet all their SLOs at all: an upper bound on every scheduler.

The bound holds for anything that forms steps for one engine: it may know the future, hold,
preempt, swap and reorder for free, and split prompts and batches at will.

**Assumptions.** Steps run one after another on the device, on one replica of any tensor-parallel
size; asynchronous scheduling overlaps only the scheduler, so it changes nothing. A step takes at
least the *floor* of its batch (`bound_floors`). It serves at most `max_num_seqs` requests, computes
at most `max_num_batched_tokens` tokens, and the KV it touches fits into `num_kv_tokens`. A step
samples at most one token of a request (no speculative decoding), a request is worked on only in
steps that start after its arrival, and a token is delivered when its step ends. Prompts share no
prefix: with prefix caching, pass prompt lengths less what can be cached.

**Relaxation.** Let x_i be 1 if request i meets its targets, with p prompt and o output tokens,
arrival a, and targets TTFT, TPOT and E for the last token. If x_i = 1,

- o - 1 decode steps follow the prefill inside [a + m, D], where m is the shortest prefill and
  D = a + min(TTFT + TPOT (o - 1), E), since the last token is due TPOT (o - 1) after the first (the
  *decode job*);
- all p prompt tokens are computed in steps inside [a, min(a + TTFT, D - d)], where d is the least
  time of those decode steps (the *prefill job*);
- these are o steps, all different.

Each job needs at least its marginal time, the part of the floor beyond `base_s`: a prefill
costs the same however it is cut, p tokens and p^2 / 2 pairs, except that a piece of one token
counts as a decode. There are at most as many such pieces as steps in the job's window.

For any times s < t the steps inside [s, t] last at most t - s together, and steps that serve a
job whose window lies in [s, t] lie there themselves. Hence, with w the marginal time of a job,

    base * K(s, t) + sum of w_j x_j over jobs j with windows in [s, t] <= t - s         (1)

where K(s, t) counts the steps, one that crosses s or t by the share of its time inside.

K is bounded from below in four ways, each valid alone:

    max_num_seqs * K           >= entries of those jobs in batches        (slots)
    num_kv_tokens * K          >= KV tokens those entries read or write   (kv)
    max_num_batched_tokens * K >= their tokens                            (tokens)
    K(a_i, D_i)                >= o_i x_i for each i                      (pace)

The first three are put into (1) directly. The last is what TPOT costs: somebody's decode must
advance everywhere, so steps cannot be rare. It is put into (1) for the job in [s, t] that needs
most steps, and for all requests together with a variable for the steps in each window of a time
grid, in which [a_i, D_i] is rounded outwards and the job windows of (1) too. In both, each of K
steps saves at most what one piece of one token of each prompt in it saves.

The bound is the floor of the largest sum of x_i over 0 <= x_i <= 1 that satisfies all of these: a
linear program, in which a schedule's true x (and its true step counts) is one solution. Rows (1)
are added where they are violated; fewer rows only make the bound larger, so it holds after any
number of rounds. For one machine with preemption and known windows, (1) for all s, t is exact
(Hall's condition), so what the bound gives away is integrality, how long steps delay those who
share them, and the knowledge of the future.

A request is left out (x_i = 0) if its shortest prefill, alone, exceeds TTFT, if its bare decode
steps, alone, exceed TPOT, if both exceed E, or if its KV exceeds `num_kv_tokens`. Each request
counts as one, whatever its weight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from sola_sched.simulator.bound.floors import HasFloors, StepFloor, floors_of
from sola_sched.simulator.bound.program import Program
from sola_sched.simulator.bound.trace import BoundRequest, Trace
from sola_sched.simulator.steps.tables import StepTables
from sola_sched.simulator.steps.time import MeasuredStepTime, StepTimeModel

__all__ = ["Bound", "BoundRequest", "upper_bound"]

# Room for rounding of the solver, requests.
_ROUND_OFF = 1e-5


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound and what made it.

    Attributes:
        num_requests: Requests of the trace.
        num_attainable: No scheduler attains more of them.
        num_impossible: Left out because not even an empty engine attains them, by reason:
            ``ttft``, ``tpot``, ``e2e``, ``kv``; a request counts under the first that applies.
        num_binding: Rows that hold with equality in the solution, by kind: ``slots``, ``kv``,
            ``tokens``, ``pace``. Empty where nothing but the requests themselves limits.
        relaxed: Value of the linear program, before rounding down.
        is_converged: False if more rows would still lower it noticeably; it holds either way.
        runtime_s: Time it took.
    """

    num_requests: int
    num_attainable: int
    num_impossible: dict[str, int] = field(default_factory=dict)
    num_binding: dict[str, int] = field(default_factory=dict)
    relaxed: float = 0.0
    is_converged: bool = True
    runtime_s: float = 0.0

    @property
    def attainable_ratio(self) -> float:
        """Share of all requests; NaN for none."""
        return self.num_attainable / self.num_requests if self.num_requests else math.nan


def upper_bound(
    requests: Iterable[BoundRequest],
    step_time: StepTimeModel | StepTables | MeasuredStepTime | StepFloor | HasFloors,
    *,
    max_num_seqs: int,
    num_kv_tokens: int,
    max_num_batched_tokens: int | None = None,
) -> Bound:
    """Most requests that any scheduler can attain; see the module for the proof.

    Args:
        requests: The trace, in any order.
        step_time: What a step takes; see `bound_floors.floors_of`.
        max_num_seqs: Most requests in a step, >= 1.
        num_kv_tokens: Tokens the KV cache holds, >= 1.
        max_num_batched_tokens: Most tokens in a step, >= 1; None for no limit.

    Raises:
        TypeError: The step time has no known floors.
        ValueError: A limit or a length is less than 1.
    """
    started_s = time.perf_counter()
    limits = {"max_num_seqs": max_num_seqs, "num_kv_tokens": num_kv_tokens}
    if max_num_batched_tokens is not None:
        limits["max_num_batched_tokens"] = max_num_batched_tokens
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"'{name}' must be >= 1 (got {value!r}).")
    trace = Trace(list(requests), limits)
    floors = floors_of(step_time)
    impossible = trace.drop_impossible(floors)
    if not trace.size:
        return Bound(
            trace.num_requests,
            0,
            num_impossible=impossible,
            runtime_s=time.perf_counter() - started_s,
        )
    program = Program(trace, floors)
    relaxed, is_converged = program.solve()
    return Bound(
        trace.num_requests,
        math.floor(relaxed + _ROUND_OFF),
        num_impossible=impossible,
        num_binding=program.num_binding(),
        relaxed=relaxed,
        is_converged=is_converged,
        runtime_s=time.perf_counter() - started_s,
    )
