"""How many requests of a trace can meet both SLOs at all: an upper bound on every scheduler.

The bound holds for anything that forms steps for one engine: it may know the future, hold,
preempt, swap and reorder for free, and split prompts and batches at will.

**Assumptions.** Steps run one after another on the device, on one replica of any tensor-parallel
size; asynchronous scheduling overlaps only the scheduler, so it changes nothing. A step takes at
least the *floor* of its batch (`bound_floors`). It serves at most `max_num_seqs` requests, computes
at most `max_num_batched_tokens` tokens, and the KV it touches fits into `num_kv_tokens`. A step
samples at most one token of a request (no speculative decoding), a request is worked on only in
steps that start after its arrival, and a token is delivered when its step ends. Prompts share no
prefix: with prefix caching, pass prompt lengths less what can be cached.

**Relaxation.** Let x_i be 1 if request i meets both targets, with p prompt and o output tokens,
arrival a, and targets TTFT and TPOT. If x_i = 1,

- all p prompt tokens are computed in steps inside [a, a + TTFT] (the *prefill job*);
- o - 1 decode steps follow inside [a + m, D], where D = a + TTFT + TPOT (o - 1), since the last
  token is due TPOT (o - 1) after the first, and m is the shortest prefill (the *decode job*);
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
steps, alone, exceed TPOT, or if its KV exceeds `num_kv_tokens`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from sola_sched.simulator.bound_floors import HasFloors, StepFloor, floors_of
from sola_sched.simulator.step_time import MeasuredStepTime, StepTimeModel
from sola_sched.slo import SloTarget

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MAX_ROUNDS = 60
# Rounds in a row that lower the value by less than this many requests end the search for rows.
_MIN_GAIN = 0.02
_MAX_IDLE_ROUNDS = 3
_MAX_CUTS = 40  # added per kind and round
_MAX_WINDOWS = 800
_MIN_WINDOW_STEPS = 5.0
# Share of a row's right-hand side by which it must be violated to be added.
_TOLERANCE = 1e-6
# Room for rounding of the solver, requests, and of times, relative.
_ROUND_OFF = 1e-5
_TIME_ROUND_OFF = 1e-9
_BLOCK = 256  # start times examined at once


@dataclass(frozen=True, slots=True)
class BoundRequest:
    """What the bound knows of a request.

    Attributes:
        arrival_s: Seconds, on any clock.
        num_prompt_tokens: Tokens to compute before the first output token, >= 1.
        num_output_tokens: Tokens generated, >= 1.
        slo: Its targets.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SloTarget


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound and what made it.

    Attributes:
        num_requests: Requests of the trace.
        num_attainable: No scheduler attains more of them.
        num_impossible: Left out because not even an empty engine attains them, by reason:
            ``ttft``, ``tpot``, ``kv``; a request counts under the first that applies.
        num_binding: Rows that hold with equality in the solution, by kind: ``slots``, ``kv``,
            ``tokens``, ``pace``. Empty where nothing but the requests themselves limits.
        relaxed: Value of the linear program, before rounding down.
        is_converged: False if rows that would tighten it were left out.
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
    step_time: StepTimeModel | MeasuredStepTime | StepFloor | HasFloors,
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
    trace = _Trace(list(requests), limits)
    floors = floors_of(step_time)
    impossible = trace.drop_impossible(floors)
    if not trace.size:
        return Bound(
            trace.num_requests,
            0,
            num_impossible=impossible,
            runtime_s=time.perf_counter() - started_s,
        )
    program = _Program(trace, floors)
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


class _Trace:
    """The requests as arrays, sorted by arrival; times from the first arrival on."""

    def __init__(self, requests: list[BoundRequest], limits: dict[str, int]) -> None:
        for request in requests:
            if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
                raise ValueError(
                    f"a request must have >= 1 prompt and output token (got {request!r})."
                )
        requests = sorted(requests, key=lambda r: r.arrival_s)
        first_s = requests[0].arrival_s if requests else 0.0
        self.num_requests = len(requests)
        self.limits = limits
        self.arrival_s = np.array([r.arrival_s - first_s for r in requests], dtype=np.float64)
        self.span_s = float(self.arrival_s[-1]) if requests else 0.0
        self.prompt = np.array([r.num_prompt_tokens for r in requests], dtype=np.float64)
        self.decodes = np.array([r.num_output_tokens - 1 for r in requests], dtype=np.float64)
        room = 1.0 + _TIME_ROUND_OFF
        self.ttft_s = np.array([r.slo.ttft_s for r in requests], dtype=np.float64) * room
        self.tpot_s = np.array([r.slo.tpot_s for r in requests], dtype=np.float64) * room
        # Chunks that the prompt needs at least.
        chunk = limits.get("max_num_batched_tokens", math.inf)
        self.chunks = np.maximum(1.0, np.ceil(self.prompt / chunk))
        # Sum over the decode steps of the tokens computed before, p + k - 1 for k = 1 to o - 1.
        self.decode_ctx = self.decodes * self.prompt + self.decodes * (self.decodes - 1.0) / 2.0

    @property
    def size(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft_due_s(self) -> FloatArray:
        return self.arrival_s + self.ttft_s + _TIME_ROUND_OFF

    @property
    def last_due_s(self) -> FloatArray:
        with np.errstate(invalid="ignore"):
            decode_s = np.where(self.decodes > 0, self.tpot_s * self.decodes, 0.0)
        return self.ttft_due_s + decode_s

    def drop_impossible(self, floors: Sequence[StepFloor]) -> dict[str, int]:
        """Keep the requests that an empty engine attains; returns how many others, by reason."""
        late_first = np.zeros(self.size, dtype=bool)
        slow = np.zeros(self.size, dtype=bool)
        for floor in floors:
            late_first |= shortest_prefill_s(self, floor) > self.ttft_s + _TIME_ROUND_OFF
            decode_s = (floor.base_s + floor.per_decode_s) * self.decodes
            decode_s += floor.per_ctx_s * self.decode_ctx
            with np.errstate(invalid="ignore"):
                slow |= (self.decodes > 0) & (
                    decode_s > self.tpot_s * self.decodes + _TIME_ROUND_OFF
                )
        too_big = self.prompt + self.decodes > self.limits["num_kv_tokens"]
        reasons = {
            "ttft": int(late_first.sum()),
            "tpot": int((slow & ~late_first).sum()),
            "kv": int((too_big & ~late_first & ~slow).sum()),
        }
        keep = ~(late_first | slow | too_big)
        for name in (
            "arrival_s", "prompt", "decodes", "ttft_s", "tpot_s", "chunks", "decode_ctx",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[keep])
        return {name: count for name, count in reasons.items() if count}


def prefill_marginal_s(trace: _Trace, floor: StepFloor) -> FloatArray:
    """Time of each prompt beyond `base_s` if no piece of it has one token."""
    p = trace.prompt
    result: FloatArray = floor.per_prefill_token_s * p + 0.5 * floor.per_prefill_attn_s * p * p
    return result


def _single_saving(floor: StepFloor) -> tuple[float, float]:
    """What a piece of one token after c others saves against being part of a chunk: u + v c."""
    u = floor.per_prefill_token_s + 0.5 * floor.per_prefill_attn_s - floor.per_decode_s
    return u, floor.per_prefill_attn_s - floor.per_ctx_s


def max_single_saving_s(trace: _Trace, floor: StepFloor) -> FloatArray:
    """Most that one such piece of each prompt saves, >= 0."""
    u, v = _single_saving(floor)
    return np.maximum(0.0, np.maximum(u, u + v * (trace.prompt - 1.0)))


def shortest_prefill_s(trace: _Trace, floor: StepFloor) -> FloatArray:
    """Time of each prefill on an empty engine, at least.

    With k pieces of one token there are at least max(chunks, k) steps; what that costs and saves
    is linear in k on both sides of k = chunks, so the minimum is at one of three values.
    """
    saving_s = max_single_saving_s(trace, floor)
    few = np.minimum(trace.chunks, trace.prompt)
    extra = [
        floor.base_s * np.maximum(trace.chunks, k) - saving_s * k
        for k in (0.0 * few, few, trace.prompt)
    ]
    marginal_s = prefill_marginal_s(trace, floor)
    return np.maximum(floor.base_s, marginal_s + np.minimum.reduce(extra))


def _top_sum(u: float, v: float, size: FloatArray, count: FloatArray) -> FloatArray:
    """Largest sum of at most `count` of the values u + v c for c = 0 to size - 1."""
    first = u + (v * (size - 1.0) if v > 0 else 0.0 * size)  # the largest value
    fall = abs(v)
    num_positive = np.where(first > 0, size, 0.0)
    if fall > 0:
        num_positive = np.minimum(num_positive, np.floor(np.maximum(first, 0.0) / fall) + 1.0)
    k = np.minimum(num_positive, count)
    result: FloatArray = np.maximum(0.0, k * first - fall * k * (k - 1.0) / 2.0)
    return result


class _Jobs:
    """Prefill and decode jobs of all requests for one floor and one way to bound the steps.

    Attributes:
        start_s, end_s: Windows [2 * num_requests], prefill jobs first; the end may be inf.
        need_s: Time each needs in them.
        num_steps: Steps each needs; they are charged `step_s` each where `kind` is ``pace``.
        saving_s: What one piece of one token saves of each, where `need_s` does not say so yet.
    """

    def __init__(self, trace: _Trace, floor: StepFloor, kind: str) -> None:
        earliest_s = trace.arrival_s + shortest_prefill_s(trace, floor)
        self.kind = kind
        self.start_s = np.concatenate([trace.arrival_s, earliest_s])
        self.end_s = np.concatenate([trace.ttft_due_s, trace.last_due_s])
        prefill_s = prefill_marginal_s(trace, floor)
        decode_s = floor.per_decode_s * trace.decodes + floor.per_ctx_s * trace.decode_ctx
        u, v = _single_saving(floor)
        step_s = floor.base_s + floor.per_decode_s
        with np.errstate(divide="ignore"):
            most = np.minimum(trace.prompt, np.floor(trace.ttft_s / step_s))
        if kind == "slots":
            # A piece of one token takes a slot itself; a prompt in such pieces has no chunk.
            share_s = floor.base_s / trace.limits["max_num_seqs"]
            prefill_s = prefill_s - _top_sum(u - share_s, v, trace.prompt, most)
            prefill_s += share_s * np.where(most < trace.prompt, 1.0, 0.0)
            decode_s += share_s * trace.decodes
        elif kind == "kv":
            share_s = floor.base_s / trace.limits["num_kv_tokens"]
            prefill_s = prefill_s - _top_sum(u, v, trace.prompt, most) + share_s * trace.prompt
            decode_s += share_s * (trace.decode_ctx + trace.decodes)
        elif kind == "tokens":
            share_s = floor.base_s / trace.limits["max_num_batched_tokens"]
            prefill_s = prefill_s - _top_sum(u, v, trace.prompt, most) + share_s * trace.prompt
            decode_s += share_s * trace.decodes
        else:
            assert kind == "pace", kind  # pieces of one token are charged to the steps
        self.need_s = np.concatenate([np.maximum(prefill_s, 0.0), decode_s])
        self.num_steps = np.concatenate([trace.chunks, trace.decodes])
        self.step_s = floor.base_s if kind == "pace" else 0.0
        self.saving_s = np.concatenate([max_single_saving_s(trace, floor), 0.0 * decode_s])

    def longest(self, inside: NDArray[np.bool_], x: FloatArray) -> tuple[int, FloatArray]:
        """The request whose steps weigh most among jobs `inside`, and what they cost it."""
        step_s = self.step_s - float(self.saving_s[inside].sum())
        if step_s <= 0.0:
            return 0, np.zeros(1)
        j = int(np.argmax(np.where(inside, self.num_steps * x, 0.0)))
        return j % (len(x) // 2), np.array([step_s * self.num_steps[j]])


class _Program:
    """The linear program; its rows grow.

    Variables are x, one per request, then the number of steps up to each point of the grid.
    """

    def __init__(self, trace: _Trace, floors: Sequence[StepFloor]) -> None:
        self._n = trace.size
        kinds = ["slots", "kv", *(["tokens"] if "max_num_batched_tokens" in trace.limits else [])]
        self._exact = [_Jobs(trace, floor, kind) for floor in floors for kind in (*kinds, "pace")]
        paced = [floor for floor in floors if floor.base_s > 0]
        self._grid = [_Grid(trace, floor) for floor in paced]
        # One grid for all floors: the variables are shared.
        width_s = max((grid.natural_width_s for grid in self._grid), default=0.0)
        for grid in self._grid:
            grid.set_width(width_s)
        self._num_columns = self._n + (_MAX_WINDOWS + 1 if self._grid else 0)
        self._rows: list[csr_array] = []
        self._right: list[FloatArray] = []
        self._kinds: list[str] = []
        self._binding: dict[str, int] = {}
        if self._grid:
            self._add_steps(trace, self._grid[0])

    def _add(self, rows: csr_array, right: FloatArray, kind: str) -> None:
        self._rows.append(rows)
        self._right.append(right)
        self._kinds += [kind] * rows.shape[0]

    def _add_steps(self, trace: _Trace, grid: _Grid) -> None:
        """Steps never decrease, and each request needs its own; the first point has none."""
        n, w = self._n, np.arange(_MAX_WINDOWS)
        ones = np.ones(_MAX_WINDOWS)
        columns = np.concatenate([n + w, n + w + 1])
        self._add(
            csr_array(
                (np.concatenate([ones, -ones]), (np.concatenate([w, w]), columns)),
                shape=(_MAX_WINDOWS, self._num_columns),
            ),
            np.zeros(_MAX_WINDOWS),
            "",
        )
        first, last = grid.outward(trace.arrival_s, trace.last_due_s)
        i = np.flatnonzero(last <= _MAX_WINDOWS)
        rows = np.arange(len(i))
        values = np.concatenate([trace.decodes[i] + trace.chunks[i], 0 * i + 1.0, 0 * i - 1.0])
        columns = np.concatenate([i, n + first[i], n + last[i]])
        self._add(
            csr_array((values, (np.tile(rows, 3), columns)), shape=(len(i), self._num_columns)),
            np.zeros(len(i)),
            "pace",
        )

    def solve(self) -> tuple[float, bool]:
        """Value of the program, and whether no violated row is left."""
        value, num_idle = float(self._n), 0
        solution = np.concatenate([np.ones(self._n), np.zeros(self._num_columns - self._n)])
        for _ in range(_MAX_ROUNDS):
            if num_idle == _MAX_IDLE_ROUNDS or not self._add_violated(solution):
                return value, True
            matrix, right = vstack(self._rows, format="csr"), np.concatenate(self._right)
            cost = np.zeros(self._num_columns)
            cost[: self._n] = -1.0
            upper = np.full(self._num_columns, np.inf)
            upper[: self._n] = 1.0
            upper[self._n : self._n + 1] = 0.0
            result = linprog(
                cost,
                A_ub=matrix,
                b_ub=right,
                bounds=np.stack([np.zeros(self._num_columns), upper], axis=1),
                method="highs",
            )
            if result.status != 0:  # numerical trouble: the last value still holds
                return value, False
            num_idle = num_idle + 1 if value + float(result.fun) < _MIN_GAIN else 0
            solution, value = result.x, min(value, -float(result.fun))
            self._count_binding(result.slack, right)
        return value, False

    def _count_binding(self, slack: FloatArray, right: FloatArray) -> None:
        tight = slack <= 1e-6 * np.maximum(1.0, np.abs(right))
        self._binding = {}
        for kind, is_tight in zip(self._kinds, tight, strict=True):
            if is_tight and kind:
                self._binding[kind] = self._binding.get(kind, 0) + 1

    def num_binding(self) -> dict[str, int]:
        return dict(sorted(self._binding.items()))

    def _add_violated(self, solution: FloatArray) -> int:
        x = np.tile(solution[: self._n], 2)
        added = 0
        for jobs in self._exact:
            for s, t in _violated_intervals(jobs, x):
                inside = (jobs.start_s >= s) & (jobs.end_s <= t)
                row = self._row(jobs, inside, *jobs.longest(inside, x))
                self._add(row, np.array([t - s]), jobs.kind)
                added += 1
        for grid in self._grid:
            for a, b in grid.violated(x, solution[self._n :]):
                inside = (grid.first >= a) & (grid.last <= b)
                row = self._row(grid.jobs, inside, self._n + a, grid.step_costs(a, b))
                self._add(row, np.array([(b - a) * grid.width_s]), "pace")
                added += 1
        return added

    def _row(
        self,
        jobs: _Jobs,
        inside: NDArray[np.bool_],
        column: int = 0,
        extra: FloatArray | None = None,
    ) -> csr_array:
        need = np.where(inside, jobs.need_s, 0.0)
        row = np.zeros(self._num_columns)
        row[: self._n] = need[: self._n] + need[self._n :]
        if extra is not None:
            row[column : column + len(extra)] += extra
        return csr_array(row[None, :])


def _violated_intervals(jobs: _Jobs, x: FloatArray) -> list[tuple[float, float]]:
    """Intervals from an arrival to a deadline that are violated most, at most one per start."""
    finite = np.flatnonzero(np.isfinite(jobs.end_s))
    if not finite.size:
        return []
    order = finite[np.argsort(jobs.end_s[finite], kind="stable")]
    start_s, end_s, need_s = jobs.start_s[order], jobs.end_s[order], (jobs.need_s * x)[order]
    num_steps, saving_s = (jobs.num_steps * x)[order], jobs.saving_s[order]
    starts = np.unique(jobs.start_s[: len(jobs.start_s) // 2])
    found = []
    for low in range(0, len(starts), _BLOCK):
        s = starts[low : low + _BLOCK, None]
        is_after = start_s >= s
        demand = np.cumsum(np.where(is_after, need_s, 0.0), axis=1)
        if jobs.step_s > 0.0:
            step_s = jobs.step_s - np.cumsum(np.where(is_after, saving_s, 0.0), axis=1)
            most_steps = np.maximum.accumulate(np.where(is_after, num_steps, 0.0), axis=1)
            demand += np.maximum(step_s, 0.0) * most_steps
        excess = np.where(end_s > s, demand - (end_s - s), -np.inf)
        best = np.argmax(excess, axis=1)
        most = excess[np.arange(len(best)), best]
        found += [
            (float(m), float(s_[0]), float(end_s[b]))
            for m, s_, b in zip(most, s, best, strict=True)
        ]
    return _pick([(m, a, b) for m, a, b in found if m > _TOLERANCE * (b - a)])


def _pick(found: list[tuple[float, Any, Any]]) -> list[tuple[Any, Any]]:
    """The most violated, and of intervals that nearly agree only one per round."""
    chosen: list[tuple[Any, Any]] = []
    for _, a, b in sorted(found, reverse=True):
        near = 0.1 * (b - a)
        if all(abs(a - c) + abs(b - d) > near for c, d in chosen):
            chosen.append((a, b))
            if len(chosen) == _MAX_CUTS:
                break
    return chosen


class _Grid:
    """The steps of one floor on a time grid: rows (1) with counted steps.

    Attributes:
        jobs: Jobs without any share of `base_s`.
        width_s: Of a window.
        first, last: The smallest run of windows [first, last) around each job's window.
    """

    def __init__(self, trace: _Trace, floor: StepFloor) -> None:
        self.jobs = _Jobs(trace, floor, "pace")
        # Independent of the targets, so that looser targets never give a smaller bound.
        self.natural_width_s = max(
            _MIN_WINDOW_STEPS * floor.base_s, 2.0 * trace.span_s / _MAX_WINDOWS
        )
        self._base_s = floor.base_s
        self._saving_s = max_single_saving_s(trace, floor)
        self.width_s = 0.0
        self.first = self.last = np.empty(0, dtype=np.int64)
        self._step_s = np.empty(0)

    def set_width(self, width_s: float) -> None:
        self.width_s = width_s
        self.first, self.last = self.outward(self.jobs.start_s, self.jobs.end_s)
        # A prompt has at most one piece of one token in each step of its prefill job; a step
        # thus saves at most the savings of all prompts whose job it may serve.
        saved = np.zeros(_MAX_WINDOWS + 2)
        n = len(self._saving_s)
        np.add.at(saved, np.minimum(self.first[:n], _MAX_WINDOWS), self._saving_s)
        np.add.at(saved, np.minimum(self.last[:n], _MAX_WINDOWS + 1), -self._saving_s)
        self._step_s = self._base_s - np.cumsum(saved)[:_MAX_WINDOWS]

    def outward(self, start_s: FloatArray, end_s: FloatArray) -> tuple[IntArray, IntArray]:
        """Windows [first, last) that cover each interval; beyond the grid for late ones."""
        first = np.floor(start_s / self.width_s)
        last = np.ceil(np.minimum(end_s / self.width_s, 2.0 * _MAX_WINDOWS))
        return np.minimum(first, _MAX_WINDOWS).astype(np.int64), last.astype(np.int64)

    def violated(self, x: FloatArray, steps: FloatArray) -> list[tuple[int, int]]:
        """Runs of windows [a, b) whose row (1) is violated."""
        inside = self.last <= _MAX_WINDOWS
        demand = np.zeros((_MAX_WINDOWS + 1, _MAX_WINDOWS + 1))
        index = (self.first[inside], self.last[inside])
        np.add.at(demand, index, (self.jobs.need_s * x)[inside])
        demand = np.cumsum(np.cumsum(demand[::-1], axis=0)[::-1], axis=1)
        points = np.arange(_MAX_WINDOWS + 1)
        base_s = np.concatenate([[0.0], np.cumsum(self._step_s * np.diff(steps))])
        room_s = points * self.width_s - base_s
        excess = demand - (room_s[None, :] - room_s[:, None])
        excess = np.where(points[None, :] > points[:, None], excess, -np.inf)
        best = np.argmax(excess, axis=1)
        most = excess[points, best]
        tolerance = _TOLERANCE * (best - points) * self.width_s
        return _pick(
            [(float(most[a]), int(a), int(best[a])) for a in np.flatnonzero(most > tolerance)]
        )

    def step_costs(self, a: int, b: int) -> FloatArray:
        """Coefficients of the step counts at the points a to b."""
        costs = np.zeros(b - a + 1)
        costs[1:] += self._step_s[a:b]
        costs[:-1] -= self._step_s[a:b]
        return costs
