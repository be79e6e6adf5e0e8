"""Baseline policies: the order each one promises, and that none loses a request or a block."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.simulator.baselines.rules import BASELINES, ORACLE_KEY

pytestmark = pytest.mark.vllm

SECONDS = StepTimeModel(base_s=1.0, per_decode_s=0.1, per_prefill_token_s=0.01)
NUM_BLOCKS = 34
NAMES = sorted(BASELINES)


def make_engine(name: str, **options) -> VirtualEngine:
    defaults = {
        "model": TINY_MODEL,
        "num_blocks": 200,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "step_time": SECONDS,
    }
    return VirtualEngine(BASELINES.get(name, AsyncScheduler), **(defaults | options))


def make_request(
    name: str, arrival_s: float, output_len: int, prompt_len: int, **options
) -> VirtualRequest:
    extra_args = {ORACLE_KEY: output_len}
    return VirtualRequest(
        name, arrival_s, output_len, prompt_len=prompt_len, extra_args=extra_args, **options
    )


def steps_of(engine: VirtualEngine, requests: list[VirtualRequest]) -> list[dict[str, int]]:
    steps: list[dict[str, int]] = []
    engine.run(requests, on_step=lambda trace: steps.append(trace.output.num_scheduled_tokens))
    return [step for step in steps if step]


def first_tokens(engine: VirtualEngine, requests: list[VirtualRequest]) -> list[str]:
    """Names of the requests that got a first token, in its order."""
    records = [r for r in engine.run(requests) if r.first_token_s is not None]
    return [r.req_id for r in sorted(records, key=lambda r: r.first_token_s)]


# Each step ---------------------------------------------------------------------------------


def test_prefill_first_runs_whole_prompts_alone_and_decodes_only_without_them():
    requests = [
        make_request("a", 0.0, 4, 60),
        make_request("b", 0.5, 2, 60),
        make_request("c", 0.5, 2, 30),
        make_request("d", 0.5, 2, 20),
    ]

    # b and c fit into 100 tokens, d no longer does: it gets a step of its own.
    assert steps_of(make_engine("prefill-first"), requests) == [
        {"a": 60},
        {"b": 60, "c": 30},
        {"d": 20},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"a": 1},
        {"a": 1},
    ]


def test_prefill_first_chunks_a_prompt_longer_than_the_budget_alone():
    requests = [make_request("a", 0.0, 3, 20), make_request("b", 0.5, 2, 250)]

    assert steps_of(make_engine("prefill-first"), requests) == [
        {"a": 20},
        {"b": 100},
        {"b": 100},
        {"b": 50},
        {"a": 1, "b": 1},
        {"a": 1},
    ]


def test_prefill_first_lets_decodes_run_while_the_next_prompt_finds_no_blocks():
    # 33 blocks of 16 tokens: a takes 20, b needs 20.
    requests = [make_request("a", 0.0, 4, 310), make_request("b", 0.5, 1, 310)]
    engine = make_engine("prefill-first", num_blocks=NUM_BLOCKS, max_num_batched_tokens=400)

    assert steps_of(engine, requests) == [{"a": 310}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 310}]


def test_decode_first_starts_the_next_batch_when_the_last_one_has_ended():
    requests = [
        make_request("a", 0.0, 2, 60),
        make_request("b", 0.0, 4, 60),
        make_request("c", 0.5, 2, 30),
    ]

    assert steps_of(make_engine("decode-first"), requests) == [
        {"a": 60, "b": 40},
        {"b": 20},  # a waits for the batch to be complete, c for its end
        {"a": 1, "b": 1},
        {"b": 1},
        {"b": 1},
        {"c": 30},
        {"c": 1},
    ]


def test_stock_mixes_decodes_and_prefill_where_the_two_extremes_do_not():
    requests = [make_request("a", 0.0, 3, 60), make_request("b", 0.5, 1, 60)]

    assert steps_of(make_engine("stock"), requests)[1] == {"a": 1, "b": 60}


# Order -------------------------------------------------------------------------------------


def test_spf_starts_the_shortest_prompt():
    requests = [
        make_request("first", 0.0, 5, 10),
        make_request("long", 0.1, 1, 90),
        make_request("short", 0.2, 9, 20),
        make_request("middle", 0.3, 1, 50),
    ]

    names = first_tokens(make_engine("spf", max_num_seqs=1), requests)

    assert names == ["first", "short", "middle", "long"]


def warm_up(num_requests: int = 30) -> list[VirtualRequest]:
    """Served before the requests under test: prompts of 64 and more answer at length."""
    return [
        make_request(f"w{i}", 0.0, *((40, 70) if i % 2 else (3, 20)), max_tokens=100)
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("name", "arrivals"),
    [
        # Requests like "small" answered 3 tokens so far, those like "big" 40.
        ("sjf", ["big", "small"]),
        # In truth small answers 60 tokens, big 2.
        ("sjf-oracle", ["small", "big"]),
    ],
)
def test_sjf_starts_the_shortest_predicted_or_true_job(name, arrivals, async_scheduling):
    lengths = {"big": (2, 70), "small": (60, 20)}
    requests = [
        *warm_up(),
        make_request("runs", 1e4, 5, 10, max_tokens=100),
        *(
            make_request(name, 1e4 + 0.1 * i, *lengths[name], max_tokens=100)
            for i, name in enumerate(arrivals, start=1)
        ),
    ]
    engine = make_engine(name, max_num_seqs=1, async_scheduling=async_scheduling)

    names = [n for n in first_tokens(engine, requests) if not n.startswith("w")]

    assert names == ["runs", *reversed(arrivals)]


def test_hrrn_lets_a_long_job_age_past_a_short_one():
    # "long" has waited 400 s for a service of about 45 s; "late" 20 s of about 5 s.
    runs = make_request("runs", 1e4, 400, 10, max_tokens=400)
    long = make_request("long", 1e4 + 1.0, 40, 70, max_tokens=100)
    late = make_request("late", 1e4 + 420.0, 3, 20, max_tokens=100)

    def order(name: str) -> list[str]:
        engine = make_engine(name, max_num_seqs=1)
        return [n for n in first_tokens(engine, [*warm_up(), runs, long, late]) if n[0] != "w"]

    assert order("hrrn") == ["runs", "long", "late"]
    assert order("sjf") == ["runs", "late", "long"]


def test_hrrn_prefers_the_shorter_of_two_that_waited_alike():
    requests = [
        *warm_up(),
        make_request("runs", 1e4, 10, 10, max_tokens=100),
        make_request("long", 1e4 + 1.0, 40, 70, max_tokens=100),
        make_request("short", 1e4 + 1.1, 3, 20, max_tokens=100),
    ]

    names = first_tokens(make_engine("hrrn", max_num_seqs=1), requests)

    assert names[-3:] == ["runs", "short", "long"]


def test_oracle_without_a_length_names_the_key():
    with pytest.raises(ValueError, match=r"'sola_oracle_output_tokens'\] of request 'a'"):
        make_engine("sjf-oracle").run([VirtualRequest("a", 0.0, 1, prompt_len=4)])


def test_an_order_of_its_own_does_not_mix_with_the_priority_policy():
    with pytest.raises(ValueError, match="must be fcfs for ShortestPrefillFirst"):
        make_engine("spf", scheduling_policy="priority")


# Rejection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reject_refuses_what_cannot_be_on_time_and_serves_the_rest_on_time(async_scheduling):
    # A step of 100 prompt tokens takes 2 s: 50 tokens/s; 40 s are 2,000 tokens or 20 requests.
    requests = [make_request(f"r{i}", 0.01 * i, 1, 100) for i in range(5)]
    requests += [make_request(f"x{i}", 3.0 + 0.01 * i, 1, 100) for i in range(40)]
    engine = make_engine(
        "reject",
        async_scheduling=async_scheduling,
        additional_config={"sola_sched": {"ttft_s": 40.0}},
    )

    records = engine.run(requests)

    refused = [r for r in records if r.finish_reason == "error"]
    served = [r for r in records if r.is_finished]
    assert len(refused) + len(served) == 45
    assert engine.scheduler.num_rejected == len(refused)
    assert 20 <= len(served) <= 26
    assert max(r.first_token_s - r.arrival_s for r in served) <= 44.0
    assert max(int(r.req_id[1:]) for r in served if r.req_id[0] == "x") < 22
    assert all(r.first_token_s is None and r.finished_s < 7.0 for r in refused)


def test_reject_follows_the_target_of_each_request():
    requests = [make_request(f"r{i}", 0.01 * i, 1, 100) for i in range(10)]
    requests += [
        VirtualRequest("tight", 5.0, 1, prompt_len=100, extra_args={"ttft_slo_ms": 3e3}),
        VirtualRequest("loose", 5.0, 1, prompt_len=100, extra_args={"ttft_slo_ms": 1e6}),
    ]

    reasons = {r.req_id: r.finish_reason for r in make_engine("reject").run(requests)}

    assert (reasons["tight"], reasons["loose"]) == ("error", "length")


def test_reject_with_vllms_own_limit_counts_as_vllm_does():
    engine = make_engine("reject")
    engine.scheduler.scheduler_config.max_num_queued_tokens = 250

    records = engine.run([make_request(f"r{i}", 0.0, 2, 100) for i in range(5)])

    # Three prompts are 300 tokens, the limit is checked before the newcomer is counted.
    assert [r.finish_reason for r in records] == ["length"] * 3 + ["error"] * 2


# Properties --------------------------------------------------------------------------------

workloads = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),
        st.integers(1, 40),
        st.integers(1, 150),
        st.booleans(),
        st.none() | st.floats(0.0, 60.0),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    workload=workloads, is_async=st.booleans(), caching=st.booleans(), num_seqs=st.integers(1, 8)
)
def test_every_request_ends_and_every_block_returns(name, workload, is_async, caching, num_seqs):
    engine = make_engine(
        name,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=num_seqs,
        async_scheduling=is_async,
        enable_prefix_caching=caching,
        additional_config={"sola_sched": {"ttft_s": 20.0}},
    )
    requests = [
        make_request(
            f"r{i}",
            arrival_s,
            output_len,
            prompt_len,
            max_tokens=output_len + 20 if with_eos else None,
            abort_s=None if abort_s is None else arrival_s + abort_s,
        )
        for i, (arrival_s, output_len, prompt_len, with_eos, abort_s) in enumerate(workload)
    ]

    records = engine.run(requests)

    reasons = {"length", "stop", "abort"} | ({"error"} if name == "reject" else set())
    assert {r.finish_reason for r in records} <= reasons
    for request, record in zip(requests, records, strict=True):
        assert record.num_output_tokens == request.output_len or not record.is_finished
    assert engine.num_free_blocks == NUM_BLOCKS - 1


@pytest.mark.parametrize("name", [n for n in NAMES if n != "reject"])
def test_tokens_are_those_of_stock_vllm(name):
    requests = [
        make_request(f"r{i}", 0.3 * i, 5 + 7 * i % 30, 10 + 37 * i % 120) for i in range(15)
    ]

    def tokens(policy: str) -> dict[str, list[int]]:
        engine = make_engine(policy, num_blocks=NUM_BLOCKS)
        kept: dict[str, object] = {}

        def keep(_: object) -> None:
            kept.update(engine.scheduler.requests)

        for request in requests:
            engine.add(request)
        engine.run(on_step=keep)
        kept.update(engine._requests)
        return {k: list(r.output_token_ids) for k, r in kept.items()}

    assert tokens(name) == tokens("stock")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_vllms_priority_policy_needs_no_class(async_scheduling):
    engine = make_engine(
        "stock", scheduling_policy="priority", max_num_seqs=2, async_scheduling=async_scheduling
    )
    requests = [make_request(f"r{i}", 0.1 * i, 6, 60, priority=-(i % 3)) for i in range(12)]

    names = first_tokens(engine, requests)

    assert len(names) == 12
    assert names.index("r11") < names.index("r3")
