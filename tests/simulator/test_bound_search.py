"""No schedule that an exhaustive search finds attains more than the bound.

The bound's own assumptions as a search: each step picks, for every request that has arrived,
a prompt piece, a decode or nothing. Pieces are one token, half the rest, the rest; waiting is
until the next arrival. Its best schedule is one that exists, so no bound may be below it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from bound_traces import MODELS, SECONDS, WIDE
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.config.slo import SloTarget
from sola_sched.simulator.bound.upper import BoundRequest, upper_bound


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
