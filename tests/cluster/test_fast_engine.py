"""The fast model against real schedulers, and against its own rules where there are none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.cluster.routers import ROUTERS
from sola_sched.compiled.functions import records_of
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.core.state import LIKELY, REQUEST
from sola_sched.prediction.length import NUM_LEVELS, LengthPrediction, remaining_at
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterRequest, Ended
from sola_sched.simulator.cluster.fast.instance import FastInstance, FastSloInstance
from sola_sched.simulator.cluster.fast.lengths import NUM_LIKELY, expected_left, likely_left
from sola_sched.simulator.cluster.faults import Death, Slowdown, Stall
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import RequestRecord, VirtualRequest
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import StepTimeModel

STEPS = StepTimeModel(
    base_s=0.01, per_decode_s=2e-4, per_ctx_s=1e-6, per_prefill_token_s=1e-4,
    per_prefill_attn_s=1e-8, weights_s=0.01, per_token_s=2e-5,
)  # fmt: skip
SLO = SloTarget(ttft_s=1.0, tpot_s=0.05)
ENGINES = [FastInstance, FastSloInstance]


def make_requests(
    count: int, rate_per_s: float, seed: int = 0, longest: int = 120, limit: int | None = None
) -> list[VirtualRequest]:
    """Requests that are cut at their lengths; with a limit they end by themselves before it."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            float(arrivals[i]),
            int(rng.integers(1, longest)),
            prompt_len=int(rng.integers(2, 900)),
            max_tokens=limit,
        )
        for i in range(count)
    ]


def make_engine(cls: type[FastInstance] = FastInstance, **options: Any) -> FastInstance:
    defaults: dict[str, Any] = {
        "kv_capacity_tokens": 400 * 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
    }
    return cls(BatchTime(STEPS), **(defaults | options))


def serve(engine: FastInstance, requests: Sequence[VirtualRequest]) -> dict[str, Ended]:
    """Every request's end, by name; each arrives at its time."""
    ended: dict[str, Ended] = {}
    waiting = list(requests)
    while waiting or math.isfinite(engine.next_s):
        if waiting and waiting[0].arrival_s <= engine.next_s:
            request = waiting.pop(0)
            length = LengthPrediction.exactly(request.output_len)
            engine.add(request, SLO, length, request.arrival_s)
            continue
        for end in engine.advance(engine.next_s):
            assert end.req_id not in ended
            ended[end.req_id] = end
    return ended


def real_times(
    requests: Sequence[VirtualRequest], is_async: bool, **options: Any
) -> list[tuple[float, float]]:
    records = real_records(requests, is_async, **options)
    return [(r.first_token_s or 0.0, r.last_token_s or 0.0) for r in records]


def real_records(
    requests: Sequence[VirtualRequest], is_async: bool, **options: Any
) -> Sequence[RequestRecord]:
    pytest.importorskip("vllm")
    from virtual_model import TINY_MODEL
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.simulator import VirtualEngine

    settings: dict[str, Any] = {
        "num_blocks": 401, "max_num_seqs": 16, "max_num_batched_tokens": 512,
    }  # fmt: skip
    engine = VirtualEngine(
        AsyncScheduler, model=TINY_MODEL, max_model_len=2048, step_time=STEPS,
        async_scheduling=is_async, **(settings | options),
    )  # fmt: skip
    return engine.run(requests)


@pytest.mark.vllm
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("rate_per_s", [2.0, 8.0])
@pytest.mark.parametrize("limit", [None, 500])
def test_with_memory_and_slots_to_spare_the_model_is_exact(
    is_async: bool, rate_per_s: float, limit: int | None
) -> None:
    requests = make_requests(60, rate_per_s, limit=limit)
    real = real_times(requests, is_async, num_blocks=3000, max_num_seqs=64)
    fast = serve(
        make_engine(is_async=is_async, kv_capacity_tokens=2999 * 16, max_num_seqs=64), requests
    )

    times = [fast[request.req_id].progress[1:] for request in requests]

    assert np.array(times) == pytest.approx(np.array(real), abs=1e-6)


@pytest.mark.vllm
def test_with_slots_and_memory_short_the_model_is_near() -> None:
    requests = make_requests(150, 12.0)
    real = np.array(real_times(requests, True))
    ends = serve(make_engine(), requests)
    fast = np.array([ends[request.req_id].progress[1:] for request in requests])
    arrivals = np.array([request.arrival_s for request in requests])

    for q in (50, 90):
        of_real = np.percentile(real[:, 0] - arrivals, q)
        assert np.percentile(fast[:, 0] - arrivals, q) == pytest.approx(of_real, rel=0.1)
        of_real = np.percentile(real[:, 1] - real[:, 0], q)
        assert np.percentile(fast[:, 1] - fast[:, 0], q) == pytest.approx(of_real, rel=0.1)


@pytest.mark.vllm
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("output_len", "share"), [(300, 0.4), (600, 0.25), (120, 0.6)])
def test_with_little_memory_as_many_are_preempted_as_in_vllm(
    is_async: bool, output_len: int, share: float
) -> None:
    """Nobody starts in a step that has preempted somebody, so nobody starts in vain."""
    rng = np.random.default_rng(3)
    requests = [
        VirtualRequest(
            f"r{i}",
            0.0,
            int(rng.integers(output_len // 2, output_len * 3 // 2)),
            prompt_len=int(rng.integers(100, 700)),
            max_tokens=1600,
        )
        for i in range(30)
    ]
    blocks = round(share * sum(-(-(r.prompt_len + r.output_len) // 16) for r in requests))
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    real = real_records(requests, is_async, num_blocks=blocks + 1, **limits)
    engine = make_engine(is_async=is_async, kv_capacity_tokens=blocks * 16, **limits)

    ended = serve(engine, requests)

    of_real = sum(record.num_preemptions for record in real)
    of_model = int(engine._engine.requests["num_preemptions"].sum())
    assert of_real > 2
    assert of_model == pytest.approx(of_real, abs=1, rel=0.1)
    real_s = max(record.last_token_s or 0.0 for record in real)
    assert max(e.progress.last_s for e in ended.values()) == pytest.approx(real_s, rel=0.01)


@pytest.mark.parametrize("cls", ENGINES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate_per_s=st.sampled_from([1.0, 10.0, 1000.0]),
    slots=st.integers(1, 20),
    kv_tokens=st.integers(1100, 6000),
    is_async=st.booleans(),
)
def test_every_request_ends_once_with_all_tokens_whatever_is_short(
    cls: type[FastInstance],
    seed: int,
    rate_per_s: float,
    slots: int,
    kv_tokens: int,
    is_async: bool,
) -> None:
    requests = make_requests(40, rate_per_s, seed)
    engine = make_engine(cls, kv_capacity_tokens=kv_tokens, max_num_seqs=slots, is_async=is_async)

    ended = serve(engine, requests)

    for request in requests:
        done = ended[request.req_id].progress
        assert done.num_tokens == request.output_len
        assert request.arrival_s < done.first_s <= done.last_s
        # No token takes less than the shortest step.
        assert done.last_s - done.first_s >= (request.output_len - 1) * 0.02 - 1e-9
    view = engine.view(1e9)
    assert view.num_requests == view.kv_used_tokens == 0


@pytest.mark.parametrize("cls", ENGINES)
def test_what_is_asked_in_between_changes_nothing_and_only_grows(cls: type[FastInstance]) -> None:
    requests = make_requests(30, 10.0)
    undisturbed = serve(make_engine(cls), requests)
    engine, waiting = make_engine(cls), list(requests)
    tokens: dict[str, int] = {}
    for now_s in np.arange(0.0, 60.0, 0.13):
        while waiting and waiting[0].arrival_s <= min(now_s, engine.next_s):
            request = waiting.pop(0)
            length = LengthPrediction.exactly(request.output_len)
            engine.add(request, SLO, length, request.arrival_s)
        while engine.next_s <= now_s:
            if waiting and waiting[0].arrival_s <= engine.next_s:
                request = waiting.pop(0)
                length = LengthPrediction.exactly(request.output_len)
                engine.add(request, SLO, length, request.arrival_s)
                continue
            for end in engine.advance(engine.next_s):
                assert end == undisturbed.pop(end.req_id)
                tokens.pop(end.req_id, None)
        engine.view(now_s).check(now_s)
        for req_id in list(undisturbed):
            progress = engine.progress(req_id, now_s)
            assert progress.num_tokens >= tokens.get(req_id, 0)
            assert progress.last_s <= now_s
            tokens[req_id] = progress.num_tokens
    assert not undisturbed


@pytest.mark.parametrize("cls", ENGINES)
def test_removed_requests_leave_slot_and_memory(cls: type[FastInstance]) -> None:
    engine = make_engine(cls)
    for request in make_requests(30, 1e6):
        engine.add(request, SLO, LengthPrediction.exactly(request.output_len), 0.0)
    for _ in range(25):
        engine.advance(engine.next_s)
    alive = [f"r{i}" for i in range(30) if engine.progress(f"r{i}", engine.next_s).num_tokens]
    assert 0 < len(alive) < 30

    for i in range(30):
        engine.remove(f"r{i}", engine.next_s)
        engine.remove(f"r{i}", engine.next_s)

    assert engine.view(engine.next_s).num_requests == 0
    assert engine.view(engine.next_s).kv_used_tokens == 0
    request = VirtualRequest("new", engine.next_s, 3, prompt_len=10)
    engine.add(request, SLO, LengthPrediction.exactly(3), engine.next_s)
    ended: list[Ended] = []
    while not ended:
        ended.extend(engine.advance(engine.next_s))
    assert ended[0].progress.num_tokens == 3


def test_the_slo_variant_keeps_more_within_both_targets_under_overload() -> None:
    requests = make_requests(300, 14.0, longest=200)
    met = []
    for cls in ENGINES:
        ended = serve(make_engine(cls, kv_capacity_tokens=40_000, max_num_seqs=64), requests)
        met.append(
            sum(
                done.first_s - r.arrival_s <= SLO.ttft_s
                and done.last_s - done.first_s <= SLO.tpot_s * max(1, done.num_tokens - 1)
                for r in requests
                for done in [ended[r.req_id].progress]
            )
        )

    assert met[1] > 1.5 * met[0]


@pytest.mark.vllm
@pytest.mark.parametrize("rate_per_s", [4.0, 9.0, 14.0])
def test_the_model_of_the_policy_is_near_the_scheduler(rate_per_s: float) -> None:
    """Share that meets both targets, and by how much others miss them; up to twice the load."""
    pytest.importorskip("vllm")
    from virtual_model import TINY_MODEL

    from sola_sched import Scheduler
    from sola_sched.simulator import VirtualEngine

    requests = make_requests(300, rate_per_s, longest=200, limit=500)
    options = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    engine = VirtualEngine(
        Scheduler, model=TINY_MODEL, max_model_len=2048, step_time=STEPS, async_scheduling=True,
        num_blocks=2501, max_num_seqs=64, max_num_batched_tokens=512,
        additional_config={CONFIG_KEY: options},
    )  # fmt: skip
    times = [(r.first_token_s or 0.0, r.last_token_s or 0.0) for r in engine.run(requests)]
    fast = serve(make_engine(FastSloInstance, kv_capacity_tokens=40_000, max_num_seqs=64), requests)

    real = measures(requests, times)
    model = measures(requests, [fast[r.req_id].progress[1:] for r in requests])

    assert model[0] == pytest.approx(real[0], abs=0.04)
    assert model[1:] == pytest.approx(real[1:], rel=0.15)


def measures(
    requests: Sequence[VirtualRequest], times: Sequence[tuple[float, float]]
) -> tuple[float, float, float]:
    """Share that meets both targets; TTFT and TPOT that 95 % do not exceed."""
    first_s, last_s = np.array(times).T
    ttft_s = first_s - np.array([r.arrival_s for r in requests])
    tpot_s = (last_s - first_s) / np.array([max(1, r.output_len - 1) for r in requests])
    met = (ttft_s <= SLO.ttft_s) & (tpot_s <= SLO.tpot_s)
    return float(met.mean()), float(np.percentile(ttft_s, 95)), float(np.percentile(tpot_s, 95))


def test_nothing_is_left_when_all_have_ended() -> None:
    engine = make_engine(FastSloInstance)
    requests = make_requests(100, 30.0, longest=200, limit=500)
    ended = serve(engine, requests)

    assert any(ended[r.req_id].progress.first_s - r.arrival_s > SLO.ttft_s for r in requests)
    at = engine._engine.at[0]
    assert not engine._engine.lists[:, 0].any()
    assert at["kv"] == at["kv_ending"] == at["num_ending"] == 0
    assert at["num_limited"] == at["num_due"] == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 4000), min_size=NUM_LEVELS, max_size=NUM_LEVELS),
    st.integers(1, 20_000),
)
def test_what_is_expected_of_an_output_is_what_the_prediction_says(
    quantiles: list[int], num_output: int
) -> None:
    length = LengthPrediction(np.sort(np.array(quantiles, float)), "oracle")
    request, likely = records_of(REQUEST, 1), np.zeros(NUM_LIKELY)
    request["predicted"], request["num_output"] = length.quantiles, num_output
    request["max_tokens"] = 1 << 40

    likely_left(request[0], likely)

    assert expected_left(request[0]) == pytest.approx(length.remaining(num_output))
    overrun = np.array([length.remaining(num_output)])
    for q, value in zip(LIKELY, likely, strict=True):
        # One that is overrun doubles: what another model says counts for nothing here.
        if length.quantiles[-1] > num_output:
            row, output = length.quantiles[None, :], np.array([num_output])
            expected = float(remaining_at(q, row, output, overrun)[0])
        else:
            expected = 2.0 * q * float(overrun[0])
        assert value == pytest.approx(max(expected, 1.0))


def test_a_request_that_ends_by_itself_takes_part_in_one_more_step() -> None:
    """Under async scheduling, and one that ends at its limit does not."""
    last_s = []
    for limit in (None, 100):
        engine, ended = make_engine(), {}
        for name, output_len, most in (("first", 20, limit), ("second", 40, None)):
            request = VirtualRequest(name, 0.0, output_len, prompt_len=10, max_tokens=most)
            engine.add(request, SLO, LengthPrediction.exactly(output_len), 0.0)
        while math.isfinite(engine.next_s):
            ended |= {end.req_id: end for end in engine.advance(engine.next_s)}
        last_s.append(ended["second"].progress.last_s)

    assert last_s[1] - last_s[0] == pytest.approx(STEPS.per_decode_s, rel=0.2)


def test_more_requests_than_there_was_room_for_at_first_are_served() -> None:
    requests = make_requests(300, 1e6)

    ended = serve(make_engine(max_num_seqs=200), requests)
    again = serve(make_engine(max_num_seqs=200), requests)

    assert ended == again
    assert all(ended[r.req_id].progress.num_tokens == r.output_len for r in requests)


def test_a_report_of_the_model_tells_what_runs_and_waits() -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(4):
        request = VirtualRequest(f"r{i}", 0.0, 100, prompt_len=100 + i)
        engine.add(request, SLO, LengthPrediction.exactly(100), 0.0)
    while engine.next_s < 0.5:
        engine.advance(engine.next_s)

    view = engine.view(0.5)

    view.check(0.5)
    assert view.num_running == view.num_waiting == 2
    assert (view.running_left == 100 - view.running_outputs).all()
    assert (view.running_ctx == np.array([100, 101]) + view.running_outputs - 1).all()


@pytest.mark.parametrize("cls", ENGINES)
@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(sorted(ROUTERS)),
    seed=st.integers(0, 999),
    at_s=st.floats(0.0, 4.0),
)
def test_a_cluster_of_fast_engines_loses_nothing(
    cls: type[FastInstance], name: str, seed: int, at_s: float
) -> None:
    requests = [ClusterRequest(r, SLO) for r in make_requests(60, 20.0, seed)]
    cluster = VirtualCluster(
        [make_engine(cls) for _ in range(3)],
        ROUTERS[name](seed),
        faults=[Death(at_s, 0), Stall(at_s, 1, 7.0), Slowdown(at_s, 2, 2.0)],
        seed=seed,
    )

    result = cluster.run(requests)

    assert all(record.completed for record in result.records)
    assert [r.num_output_tokens for r in result.records] == [r.request.output_len for r in requests]
    assert all(r.arrival_s <= r.first_token_s <= r.last_token_s for r in result.records)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(("cls", "times"), [(FastInstance, 100.0), (FastSloInstance, 50.0)])
def test_the_model_is_many_times_faster_than_what_it_models(
    cls: type[FastInstance], times: float
) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched import Scheduler
    from sola_sched.simulator import VirtualEngine

    profile = load_step_profile("llama-3-8b-a100")
    assert profile.num_blocks is not None
    requests = make_requests(300, 14.0, longest=700)
    engine = VirtualEngine(
        Scheduler if cls is FastSloInstance else AsyncScheduler, model=profile.model_config(),
        num_blocks=profile.num_blocks, async_scheduling=True, step_time=profile.step_time,
    )  # fmt: skip

    def fast() -> FastInstance:
        kv_tokens = (profile.num_blocks - 1) * 16
        return cls(BatchTime(profile.step_time), kv_capacity_tokens=kv_tokens)

    serve(fast(), requests)  # compiles
    begin_s = time.process_time()
    engine.run(requests)
    real_s = time.process_time() - begin_s
    begin_s = time.process_time()
    serve(fast(), requests)

    assert real_s > times * (time.process_time() - begin_s)
