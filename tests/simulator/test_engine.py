"""The virtual engine against schedules computed by hand, on vLLM's own scheduler."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sola_sched.simulator import (
    LLAMA_3_8B_A100,
    LLAMA_3_8B_A100_NUM_BLOCKS,
    RequestRecord,
    SchedulerStallError,
    StepTimeModel,
    StepTrace,
    VirtualClock,
    VirtualEngine,
    VirtualRequest,
)

pytestmark = pytest.mark.vllm

SECONDS = StepTimeModel(base_s=1.0, per_decode_s=0.1, per_prefill_token_s=0.01)


def make_engine(scheduler_cls=AsyncScheduler, **options) -> VirtualEngine:
    defaults = {
        "model": TINY_MODEL,
        "num_blocks": 200,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "step_time": SECONDS,
    }
    return VirtualEngine(scheduler_cls, **(defaults | options))


def make_workload(num_requests: int, seed: int = 0, **options) -> list[VirtualRequest]:
    rng = random.Random(seed)
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=rng.uniform(0.0, 20.0),
            output_len=rng.randint(1, 60),
            prompt_len=rng.randint(1, 120),
            **options,
        )
        for i in range(num_requests)
    ]


def run_tight(async_scheduling: bool, caching: bool) -> tuple[VirtualEngine, list[RequestRecord]]:
    engine = make_engine(
        num_blocks=34, async_scheduling=async_scheduling, enable_prefix_caching=caching
    )
    return engine, engine.run(make_workload(40))


THREE = [
    VirtualRequest("a", 0.0, output_len=3, prompt_len=60),
    VirtualRequest("b", 0.5, output_len=2, prompt_len=80),
    VirtualRequest("c", 0.5, output_len=1, prompt_len=30),
]


@pytest.mark.parametrize(
    ("async_scheduling", "steps", "first_s", "last_s"),
    [
        # Step by step: (scheduled, start, end), tokens of each request.
        (
            False,
            [
                ((0.0, 0.0, 1.6), {"a": 60}),
                ((1.6, 1.6, 3.69), {"a": 1, "b": 80, "c": 19}),
                ((3.69, 3.69, 5.0), {"a": 1, "b": 1, "c": 11}),
            ],
            {"a": 1.6, "b": 3.69, "c": 5.0},
            {"a": 5.0, "b": 5.0, "c": 5.0},
        ),
        # Each step is scheduled when the one before starts, so b and c, which arrive during
        # the first step, wait for the second one too.
        (
            True,
            [
                ((0.0, 0.0, 1.6), {"a": 60}),
                ((0.0, 1.6, 2.7), {"a": 1}),
                ((1.6, 2.7, 4.79), {"a": 1, "b": 80, "c": 19}),
                ((2.7, 4.79, 6.0), {"b": 1, "c": 11}),
            ],
            {"a": 1.6, "b": 4.79, "c": 6.0},
            {"a": 4.79, "b": 6.0, "c": 6.0},
        ),
    ],
    ids=["sync", "async"],
)
def test_three_requests_match_the_schedule_computed_by_hand(
    async_scheduling, steps, first_s, last_s
):
    engine = make_engine(async_scheduling=async_scheduling)
    traces: list[StepTrace] = []

    records = {r.req_id: r for r in engine.run(THREE, on_step=traces.append)}

    executed = [t for t in traces if t.output.num_scheduled_tokens]
    assert [t.output.num_scheduled_tokens for t in executed] == [tokens for _, tokens in steps]
    times = [(t.scheduled_s, t.start_s, t.end_s) for t in executed]
    assert times == [pytest.approx(expected) for expected, _ in steps]
    assert {k: r.first_token_s for k, r in records.items()} == pytest.approx(first_s)
    assert {k: r.last_token_s for k, r in records.items()} == pytest.approx(last_s)
    assert [r.num_output_tokens for r in records.values()] == [3, 2, 1]
    assert all(r.is_finished for r in records.values())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_same_workload_gives_the_same_records(async_scheduling):
    assert run_tight(async_scheduling, True)[1] == run_tight(async_scheduling, True)[1]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemptions_lose_no_token_and_no_block(async_scheduling, caching):
    engine, records = run_tight(async_scheduling, caching)

    assert sum(r.num_preemptions for r in records) >= 5
    assert [r.num_output_tokens for r in records] == [r.output_len for r in make_workload(40)]
    assert engine.num_free_blocks == 33


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_eos_ends_the_output_at_its_position_and_not_through_the_limit(async_scheduling):
    engine = make_engine(async_scheduling=async_scheduling)
    limits: list[int] = []
    engine.add(VirtualRequest("a", 0.0, output_len=7, prompt_len=10, max_tokens=50))
    engine.add(VirtualRequest("b", 0.0, output_len=7, prompt_len=10))

    def watch(_: StepTrace) -> None:
        limits.extend(r.max_tokens for r in engine.scheduler.requests.values())

    a, b = engine.run(on_step=watch)

    assert (a.finish_reason, a.num_output_tokens) == ("stop", 7)
    assert (b.finish_reason, b.num_output_tokens) == ("length", 7)
    assert set(limits) == {7, 50}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_aborts_in_any_state_free_their_blocks_and_spare_the_others(async_scheduling):
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=34, max_num_seqs=3)
    rng = random.Random(1)
    workload = [
        VirtualRequest(
            r.req_id,
            r.arrival_s,
            r.output_len,
            prompt_len=r.prompt_len,
            abort_s=r.arrival_s + rng.uniform(-1.0, 300.0) if i % 2 else None,
        )
        for i, r in enumerate(make_workload(40))
    ]

    records = engine.run(workload)

    aborted = [r for r in records if r.is_aborted]
    assert len([r for r in aborted if r.scheduled_s is None]) >= 2
    assert len([r for r in aborted if r.num_output_tokens]) >= 2
    for request, record in zip(workload, records, strict=True):
        assert record.is_aborted or record.num_output_tokens == request.output_len
        assert not record.is_aborted or request.abort_s is not None
    assert engine.num_free_blocks == 33


def test_abort_during_a_step_discards_the_token_in_flight():
    engine = make_engine()

    (record,) = engine.run([VirtualRequest("a", 0.0, 5, prompt_len=60, abort_s=1.0)])

    assert (record.finish_reason, record.num_output_tokens) == ("abort", 0)
    assert record.finished_s == pytest.approx(1.6)


def test_shared_prefix_is_computed_once():
    prompt = list(range(1, 65))
    engine = make_engine(enable_prefix_caching=True)
    tokens: list[dict[str, int]] = []
    engine.run(
        [
            VirtualRequest("a", 0.0, 1, prompt_token_ids=prompt),
            VirtualRequest("b", 9.0, 1, prompt_token_ids=[*prompt, 7]),
        ],
        on_step=lambda t: tokens.append(t.output.num_scheduled_tokens),
    )

    assert [t for t in tokens if t] == [{"a": 64}, {"b": 1}]


def test_priority_policy_serves_the_urgent_request_first():
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)

    late, urgent = engine.run(
        [
            VirtualRequest("late", 0.0, 1, prompt_len=10, priority=1),
            VirtualRequest("urgent", 0.0, 1, prompt_len=10, priority=0),
        ]
    )

    assert urgent.first_token_s < late.first_token_s


def test_clock_jumps_over_idle_time_and_reaches_the_scheduler():
    class WithClock(AsyncScheduler):
        sola_clock = None
        sola_wall_clock = None

    clock = VirtualClock()
    engine = make_engine(WithClock, clock=clock)
    (record,) = engine.run([VirtualRequest("a", 1e6, 1, prompt_len=10)])

    assert engine.scheduler.sola_clock is clock
    assert engine.scheduler.sola_wall_clock is clock
    assert (record.scheduled_s, clock.now) == (1e6, pytest.approx(1e6 + 1.1))
    assert engine.num_steps == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_scheduler_that_schedules_nothing_is_reported(async_scheduling):
    class Stuck(AsyncScheduler):
        def schedule(self, throttle_prefills=False):
            self.max_num_scheduled_tokens = 0
            return super().schedule(throttle_prefills)

    engine = make_engine(Stuck, stall_limit_s=0.1, async_scheduling=async_scheduling)
    with pytest.raises(SchedulerStallError, match=r"within 0.1 s .*waiting 1, free blocks 199"):
        engine.run([VirtualRequest("a", 0.0, 1, prompt_len=10)])


def test_scheduler_that_forgets_a_request_is_reported():
    class Forgetful(AsyncScheduler):
        def add_request(self, request):
            pass

    with pytest.raises(RuntimeError, match="1 of 1 requests never ended, first 'a'"):
        make_engine(Forgetful).run([VirtualRequest("a", 0.0, 1, prompt_len=10)])


def test_options_of_one_engine_do_not_leak_into_another():
    first = make_engine(max_num_seqs=1, additional_config={"x": 1})
    second = make_engine(max_num_seqs=5, enable_prefix_caching=True)

    assert first.scheduler.max_num_running_reqs == 1
    assert first.vllm_config.additional_config == {"x": 1}
    assert second.vllm_config.additional_config == {}
    assert not first.vllm_config.cache_config.enable_prefix_caching


def test_invalid_requests_name_the_rule():
    engine = make_engine()
    engine.add(VirtualRequest("a", 0.0, 1, prompt_len=1))
    with pytest.raises(ValueError, match="'req_id' must be unique"):
        engine.add(VirtualRequest("a", 0.0, 1, prompt_len=1))
    with pytest.raises(ValueError, match=r"must fit into max_model_len 512 \(got 500 \+ 13\)"):
        engine.add(VirtualRequest("b", 0.0, 13, prompt_len=500))
    with pytest.raises(ValueError, match="one of 'prompt_len' and 'prompt_token_ids'"):
        VirtualRequest("c", 0.0, 1)
    with pytest.raises(ValueError, match="must be >= output_len 5"):
        VirtualRequest("d", 0.0, 5, prompt_len=1, max_tokens=4)
    with pytest.raises(ValueError, match="'num_blocks' must be >= 33"):
        make_engine(num_blocks=32)
    with pytest.raises(ValueError, match="one of llama-3-8b"):
        make_engine(model="gpt-5")


def test_a100_preset_reproduces_its_roofline():
    engine = make_engine(
        model="llama-3-8b",
        num_blocks=LLAMA_3_8B_A100_NUM_BLOCKS,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        step_time=LLAMA_3_8B_A100,
    )
    times: list[float] = []
    engine.run(
        [VirtualRequest("a", 0.0, 2, prompt_len=2048)],
        on_step=lambda t: times.append(t.end_s - t.start_s),
    )

    compute_s = 2 * 8.03e9 * 2048 / 171.6e12
    attention_s = 4 * 32 * 4096 * 2048**2 / 2 / 171.6e12
    read_s = 16e9 / 1.6e12
    assert times[0] == pytest.approx(read_s + compute_s + attention_s, rel=0.01)
    assert times[1] == pytest.approx(read_s + 3.8e-5 + 2048 * 131072 / 1.6e12, rel=0.01)
