"""The upper bound against exhaustive search, real schedulers and hand-made cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_model import TINY_MODEL

from sola_sched.bench.backends.base import slo_options
from sola_sched.bench.data.workload import Workload
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import meets_slo, tpot_s, ttft_s
from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel
from sola_sched.simulator import (
    LLAMA_3_8B_A100,
    MeasuredStepTime,
    StepTimeModel,
    load_step_profile,
    profile_names,
)
from sola_sched.simulator.bound import program as bound_program
from sola_sched.simulator.bound.floors import StepFloor, floors_of
from sola_sched.simulator.bound.upper import BoundRequest, upper_bound

SECONDS = StepTimeModel(
    base_s=1.0,
    per_decode_s=0.25,
    per_ctx_s=0.0625,
    per_prefill_token_s=0.5,
    per_prefill_attn_s=0.03125,
)
# Up to three tokens a step hide behind the reading of the weights.
ROOFLINE = StepTimeModel(
    base_s=0.25,
    per_ctx_s=0.0625,
    per_prefill_attn_s=0.03125,
    weights_s=1.5,
    per_token_s=0.5,
)
MODELS = {"linear": SECONDS, "roofline": ROOFLINE}
WIDE = {"max_num_seqs": 256, "num_kv_tokens": 400_000}
SLO = SloTarget(ttft_s=0.8, tpot_s=0.12)


def make_trace(num_requests: int, rate_per_s: float, *, seed: int = 0, slo=SLO):
    """Poisson arrivals; lognormal lengths with means of about 1,150 and 210 tokens."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, num_requests))
    prompts = np.clip(rng.lognormal(6.6, 1.0, num_requests), 1, 7000)
    outputs = np.clip(rng.lognormal(5.0, 0.8, num_requests), 1, 1000)
    return [
        BoundRequest(float(a), int(p), int(o), slo)
        for a, p, o in zip(arrivals, prompts, outputs, strict=True)
    ]


# Exhaustive search ---------------------------------------------------------------------------
#
# The bound's own assumptions as a search: each step picks, for every request that has arrived,
# a prompt piece, a decode or nothing. Pieces are one token, half the rest, the rest; waiting is
# until the next arrival. Its best schedule is one that exists, so no bound may be below it.


def can_attain(trace, model, count, *, max_num_seqs, num_kv_tokens, max_num_batched_tokens=None):
    """Whether some schedule of the search attains at least `count` requests."""
    most_tokens = max_num_batched_tokens or math.inf

    @cache
    def step_s(pieces):
        scheduled = dict(enumerate(n for n, _ in pieces))
        requests = {
            i: SimpleNamespace(num_computed_tokens=has + n) for i, (n, has) in enumerate(pieces)
        }
        return model(SimpleNamespace(num_scheduled_tokens=scheduled), requests)

    def options(request, state):
        has, first_s = state
        if first_s is not None:
            return (0, 1)
        rest = request.num_prompt_tokens - has
        return tuple({0, 1, (rest + 1) // 2, rest})

    def last_due_s(request, first_s):
        num_decodes = request.num_output_tokens - 1
        return first_s + (request.slo.tpot_s * num_decodes if num_decodes else 0.0)

    def alive(request, state, now_s):
        has, first_s = state
        if first_s is None:
            return now_s <= request.arrival_s + request.slo.ttft_s
        left = request.num_prompt_tokens + request.num_output_tokens - 1 - has
        return now_s + left * model.base_s <= last_due_s(request, first_s)

    seen = set()

    def search(now_s, states, done):
        if done >= count:
            return True
        states = tuple(
            s if s is not None and alive(r, s, now_s) else None
            for r, s in zip(trace, states, strict=True)
        )
        if done + sum(s is not None for s in states) < count or (now_s, states, done) in seen:
            return False
        seen.add((now_s, states, done))
        later = [r.arrival_s for r in trace if r.arrival_s > now_s]
        if later and search(min(later), states, done):
            return True
        choices = [
            options(r, s) if s is not None and r.arrival_s <= now_s else (0,)
            for r, s in zip(trace, states, strict=True)
        ]
        for pick in itertools.product(*choices):
            pieces = tuple((n, s[0]) for n, s in zip(pick, states, strict=True) if n)
            if (
                not pieces
                or len(pieces) > max_num_seqs
                or sum(n for n, _ in pieces) > most_tokens
                or sum(n + has for n, has in pieces) > num_kv_tokens
            ):
                continue
            end_s = now_s + step_s(pieces)
            after, num_new = [], 0
            for request, state, n in zip(trace, states, pick, strict=True):
                if not n:
                    after.append(state)
                    continue
                has, first_s = state[0] + n, state[1]
                if first_s is None and has == request.num_prompt_tokens:
                    if end_s > request.arrival_s + request.slo.ttft_s:
                        after.append(None)
                        continue
                    first_s = end_s
                if has == request.num_prompt_tokens + request.num_output_tokens - 1:
                    num_new += end_s <= last_due_s(request, first_s)
                    after.append(None)
                else:
                    after.append((has, first_s))
            if search(end_s, tuple(after), done + num_new):
                return True
        return False

    return search(0.0, tuple((0, None) for _ in trace), 0)


small_requests = st.builds(
    BoundRequest,
    arrival_s=st.integers(0, 6).map(float),
    num_prompt_tokens=st.integers(1, 6),
    num_output_tokens=st.integers(1, 3),
    slo=st.builds(
        SloTarget,
        ttft_s=st.integers(2, 12).map(lambda x: x / 2),
        tpot_s=st.integers(5, 16).map(lambda x: x / 4),
    ),
)
small_limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "num_kv_tokens": st.integers(6, 30),
        "max_num_batched_tokens": st.none() | st.integers(2, 8),
    }
)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@settings(max_examples=120, deadline=None)
@given(trace=st.lists(small_requests, min_size=1, max_size=4), limits=small_limits)
def test_no_schedule_of_an_exhaustive_search_attains_more(model, trace, limits):
    bound = upper_bound(trace, model, **limits)

    assert bound.num_attainable == len(trace) or not can_attain(
        trace, model, bound.num_attainable + 1, **limits
    )


@settings(max_examples=20, deadline=None)
@given(
    trace=st.lists(
        st.builds(
            BoundRequest,
            arrival_s=st.just(0.0),
            num_prompt_tokens=st.integers(1, 3),
            num_output_tokens=st.integers(1, 2),
            slo=st.builds(
                SloTarget, ttft_s=st.integers(2, 8).map(float), tpot_s=st.sampled_from([1.5, 3.0])
            ),
        ),
        min_size=4,
        max_size=5,
    ),
    num_seqs=st.integers(1, 2),
)
def test_no_schedule_of_a_burst_attains_more(trace, num_seqs):
    limits = {"max_num_seqs": num_seqs, "num_kv_tokens": 100}
    bound = upper_bound(trace, SECONDS, **limits)

    assert bound.num_attainable == len(trace) or not can_attain(
        trace, SECONDS, bound.num_attainable + 1, **limits
    )


def test_last_tokens_that_are_due_together_leave_room_for_one_answer():
    # Each: 1 + 2 + 0.25 s for the prompt, and three decode steps of more than a second.
    trace = [BoundRequest(0.0, 4, 4, SloTarget(e2e_s=7.0)) for _ in range(3)]

    assert upper_bound(trace, SECONDS, **WIDE).num_attainable < 3
    loose = [replace(r, slo=SloTarget(e2e_s=30.0)) for r in trace]
    assert upper_bound(loose, SECONDS, **WIDE).num_attainable == 3


def test_search_and_bound_agree_where_one_request_must_be_given_up():
    # Each prefill takes 1 + 2 + 0.25 = 3.25 s of its own; two together 5.5 s, three 7.75 s.
    trace = [BoundRequest(0.0, 4, 1, SloTarget(ttft_s=6.0)) for _ in range(3)]

    assert upper_bound(trace, SECONDS, **WIDE).num_attainable == 2
    assert can_attain(trace, SECONDS, 2, **WIDE)
    assert not can_attain(trace, SECONDS, 3, **WIDE)


# Real schedulers -----------------------------------------------------------------------------

NUM_BLOCKS = 34
SCHEDULERS = (
    "stock", "sola", "decode-first", "hrrn", "prefill-first", "reject", "sjf", "sjf-oracle", "spf",
)  # fmt: skip


def num_attained(name, model, trace, slo, limits, *, is_async):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    import sola_sched
    from sola_sched.simulator import VirtualEngine, VirtualRequest
    from sola_sched.simulator.baselines.rules import BASELINES, ORACLE_KEY

    classes = {"stock": AsyncScheduler, "sola": sola_sched.Scheduler, **BASELINES}
    engine = VirtualEngine(
        classes[name],
        model=TINY_MODEL,
        num_blocks=NUM_BLOCKS,
        max_model_len=512,
        step_time=model,
        async_scheduling=is_async,
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        additional_config={"sola_sched": slo_options(slo, Workload(()))},
    )
    records = engine.run(
        [
            VirtualRequest(
                f"r{i}",
                r.arrival_s,
                r.num_output_tokens,
                prompt_len=r.num_prompt_tokens,
                extra_args={ORACLE_KEY: r.num_output_tokens},
            )
            for i, r in enumerate(trace)
        ]
    )
    count = 0
    for record in records:
        if record.is_finished:
            ttft = ttft_s(record.arrival_s, record.first_token_s)
            latency = record.last_token_s - record.arrival_s
            count += meets_slo(ttft, tpot_s(latency, ttft, record.num_output_tokens), latency, slo)
    return count


@pytest.mark.vllm
@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.floats(0.0, 100.0), st.integers(1, 40), st.integers(1, 12)),
        min_size=1,
        max_size=25,
    ),
    slo=st.builds(SloTarget, ttft_s=st.floats(3.0, 60.0), tpot_s=st.floats(1.3, 20.0))
    | st.builds(SloTarget, e2e_s=st.floats(4.0, 100.0))
    | st.builds(SloTarget, ttft_s=st.floats(3.0, 20.0), e2e_s=st.floats(20.0, 100.0)),
    max_num_seqs=st.integers(1, 8),
    num_tokens=st.sampled_from([16, 64, 512]),
    is_async=st.booleans(),
    model=st.sampled_from(list(MODELS.values())),
)
def test_no_scheduler_attains_more(name, lengths, slo, max_num_seqs, num_tokens, is_async, model):
    pytest.importorskip("vllm")
    trace = [BoundRequest(a, p, o, slo) for a, p, o in lengths]
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": num_tokens}

    bound = upper_bound(trace, model, num_kv_tokens=(NUM_BLOCKS - 1) * 16, **limits)
    attained = num_attained(name, model, trace, slo, limits, is_async=is_async)

    assert attained <= bound.num_attainable


# Shape of the bound --------------------------------------------------------------------------


def test_all_requests_of_an_idle_engine_are_attainable():
    trace = make_trace(100, 0.2)

    bound = upper_bound(trace, LLAMA_3_8B_A100, max_num_batched_tokens=8192, **WIDE)

    assert (bound.num_attainable, bound.num_impossible) == (100, {})


@pytest.mark.parametrize(
    ("slo", "reason"),
    [
        (SloTarget(0.01, 1.0), "ttft"),
        (SloTarget(100.0, 0.01), "tpot"),
        (SloTarget(e2e_s=0.1), "e2e"),
    ],
)
def test_impossible_targets_give_zero_and_the_reason(slo, reason):
    trace = [BoundRequest(float(i), 200, 20, slo) for i in range(10)]

    bound = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    assert (bound.num_attainable, bound.num_impossible) == (0, {reason: 10})


def test_a_request_larger_than_the_cache_is_impossible():
    trace = [BoundRequest(0.0, 90, 11, SloTarget()), BoundRequest(0.0, 90, 12, SloTarget())]

    bound = upper_bound(trace, LLAMA_3_8B_A100, max_num_seqs=8, num_kv_tokens=100)

    assert (bound.num_attainable, bound.num_impossible) == (1, {"kv": 1})


def test_requests_without_targets_are_always_attainable():
    trace = make_trace(300, 100.0, slo=SloTarget())

    assert upper_bound(trace, LLAMA_3_8B_A100, **WIDE).num_attainable == 300


def test_an_empty_trace_has_a_bound_of_zero():
    bound = upper_bound([], LLAMA_3_8B_A100, **WIDE)

    assert bound.num_attainable == 0
    assert math.isnan(bound.attainable_ratio)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 100),
    rate_per_s=st.floats(2.0, 40.0),
    ttft_s=st.floats(0.1, 3.0),
    tpot_s=st.floats(0.012, 0.3),
    ttft_factor=st.floats(1.0, 3.0),
    tpot_factor=st.floats(1.0, 3.0),
)
def test_looser_targets_never_lower_the_bound(
    seed, rate_per_s, ttft_s, tpot_s, ttft_factor, tpot_factor
):
    tight, loose = SloTarget(ttft_s, tpot_s), SloTarget(ttft_s * ttft_factor, tpot_s * tpot_factor)

    def bound(slo):
        trace = make_trace(60, rate_per_s, seed=seed, slo=slo)
        return upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    below, above = bound(tight), bound(loose)

    # Rows are added until they change less than this.
    assert below.relaxed <= above.relaxed + 0.1


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ({"max_num_seqs": 4}, "slots"),
        ({"num_kv_tokens": 9000}, "kv"),
        ({"max_num_batched_tokens": 64}, "tokens"),
    ],
)
def test_a_limit_that_binds_lowers_the_bound_and_is_named(limit, kind):
    trace = make_trace(400, 6.0)

    free = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)
    limited = upper_bound(trace, LLAMA_3_8B_A100, **(WIDE | limit))

    assert limited.num_attainable < 0.97 * free.num_attainable
    assert limited.num_binding[kind] >= 1


def test_tight_tpot_costs_steps():
    # The same work, but steps of 10 ms must come every 14 ms instead of every 100 ms.
    def bound(tpot_s):
        trace = make_trace(300, 7.0, slo=SloTarget(0.5, tpot_s))
        return upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    tight = bound(0.014)

    assert tight.num_attainable < 0.9 * bound(0.1).num_attainable
    assert tight.num_binding["pace"] >= 1


def test_a_burst_is_limited_by_its_prefill_work():
    # 0.8 s less one step hold 8 prompts of 1,000 tokens (95 ms each).
    trace = [BoundRequest(5.0, 1000, 1, SLO) for _ in range(50)]

    assert upper_bound(trace, LLAMA_3_8B_A100, **WIDE).num_attainable == 8


def test_stopping_early_keeps_the_bound_valid(monkeypatch):
    trace = make_trace(150, 12.0)
    full = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)
    monkeypatch.setattr(bound_program, "_MAX_ROUNDS", 1)

    early = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    assert full.is_converged
    assert not early.is_converged
    assert full.num_attainable <= early.num_attainable < 150


def test_every_floor_of_a_step_time_counts():
    compute, memory = StepFloor(0.001, per_prefill_token_s=1e-4), StepFloor(0.01)

    class Roofline:
        def floors(self):
            return [compute, memory]

    trace = make_trace(200, 15.0)

    both = upper_bound(trace, Roofline(), **WIDE).num_attainable

    assert both <= upper_bound(trace, compute, **WIDE).num_attainable
    assert both <= upper_bound(trace, memory, **WIDE).num_attainable


def test_a_step_time_without_floors_is_refused():
    with pytest.raises(TypeError, match=r"method floors\(\) \(got function\)"):
        upper_bound([], lambda output, requests: 1.0, **WIDE)


MEASURED = MeasuredStepTime(
    CostModel.from_coefficients(
        Coefficients(a0=2e-8, b0=5e-9, c0=1e-4, d0=4e-3, a1=3e-5, b1=1e-7, c1=7e-3, overlap=3e-3)
    )
)
STEP_TIMES = {
    "linear": LLAMA_3_8B_A100,
    "measured": MEASURED,
    "smooth": replace(ROOFLINE, overlap_power=2.0),
    **{name: load_step_profile(name).step_time for name in profile_names()},
}


@pytest.mark.parametrize("name", sorted(STEP_TIMES))
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.just(1) | st.integers(1, 3000), st.integers(0, 5000), st.booleans()),
        min_size=1,
        max_size=300,
    )
)
def test_no_step_is_shorter_than_its_floors(name, batch):
    step_time = STEP_TIMES[name]
    scheduled = {str(i): n for i, (n, _, _) in enumerate(batch)}
    requests = {}
    for i, (n, has, decodes) in enumerate(batch):
        total = has + n
        num_prompt = max(1, has) if decodes and n == 1 else total + 1
        requests[str(i)] = SimpleNamespace(
            num_computed_tokens=total,
            num_prompt_tokens=num_prompt,
            num_tokens=max(num_prompt, total),
        )
    measured_s = step_time(SimpleNamespace(num_scheduled_tokens=scheduled), requests)

    for floor in floors_of(step_time):
        low_s = floor.base_s
        for n, has, _ in batch:
            prefill_s = floor.per_prefill_token_s * n
            prefill_s += floor.per_prefill_attn_s * n * (has + 0.5 * n)
            decode_s = floor.per_decode_s + floor.per_ctx_s * has
            low_s += prefill_s if n > 1 else min(decode_s, prefill_s)
        assert low_s <= measured_s * (1 + 1e-9)


def test_a_roofline_is_bounded_by_both_of_its_sides():
    def bound(**terms):
        model = StepTimeModel(base_s=1e-3, per_ctx_s=8e-8, **terms)
        return upper_bound(make_trace(300, 12.0), model, **WIDE).num_attainable

    both = bound(weights_s=1e-2, per_token_s=9e-5)

    assert both <= bound(per_token_s=9e-5) < 300
    assert both <= bound(weights_s=1e-2)
    # Less than the sum of both sides costs.
    assert both > bound(weights_s=1e-2, per_decode_s=9e-5, per_prefill_token_s=9e-5)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "'max_num_seqs' must be >= 1"),
        ({"num_kv_tokens": 0}, "'num_kv_tokens' must be >= 1"),
        ({"max_num_batched_tokens": 0}, "'max_num_batched_tokens' must be >= 1"),
    ],
)
def test_invalid_limits_name_the_rule(limits, message):
    with pytest.raises(ValueError, match=message):
        upper_bound([], LLAMA_3_8B_A100, **(WIDE | limits))


def test_a_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match=">= 1 prompt and output token"):
        upper_bound([BoundRequest(0.0, 0, 1, SLO)], LLAMA_3_8B_A100, **WIDE)
