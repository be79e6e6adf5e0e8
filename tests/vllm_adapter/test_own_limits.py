"""What vLLM keeps to by itself holds under every plan: how long chunks are, and who is split."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from image_prompts import IMAGE, images
from loaded_engine import MODES, changed, make_engine, make_workload, with_policy
from needs import NEEDS_SWAPPING
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import sola_sched
from sola_sched.config.policies import PolicyTraits
from sola_sched.core.state import StepPlan, StepState
from sola_sched.simulator import StepTrace, VirtualEngine

pytestmark = pytest.mark.vllm

POLICIES = pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])


# Chunks ---------------------------------------------------------------------------------------

THRESHOLD = 96


def with_threshold(scheduler_cls: type[Any], threshold: int, is_adaptive: bool) -> type[Any]:
    def change(arguments: dict[str, Any]) -> None:
        config = arguments["vllm_config"].scheduler_config
        config.long_prefill_token_threshold = threshold
        config.long_prefill_token_threshold_adaptive = is_adaptive

    return changed(scheduler_cls, change)


def watched_chunks(engine: VirtualEngine) -> list[tuple[int, int]]:
    """The longest chunk of each step, and what the operator allows beside so many requests."""
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    chunks: list[tuple[int, int]] = []
    config, has_adaptive = scheduler.scheduler_config, hasattr(scheduler, "deferred_waiting")

    def watched() -> Any:
        num_requests = sum(not r.is_finished() for r in scheduler.requests.values())
        limit = config.long_prefill_token_threshold
        if has_adaptive and config.long_prefill_token_threshold_adaptive:
            limit = max(limit, config.max_num_batched_tokens // max(1, num_requests))
        if has_adaptive and num_requests <= 1:
            limit = config.max_num_batched_tokens
        output = schedule()
        chunks.append((max(output.num_scheduled_tokens.values(), default=0), limit))
        return output

    scheduler.schedule = watched
    return chunks


@MODES
@POLICIES
@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
def test_no_chunk_is_longer_than_the_operator_allows(
    policy: str, is_adaptive: bool, is_async: bool
) -> None:
    engine = make_engine(
        with_threshold(sola_sched.Scheduler, THRESHOLD, is_adaptive),
        sola=with_policy(policy),
        async_scheduling=is_async,
    )
    chunks = watched_chunks(engine)
    engine.run(make_workload(50))

    assert [(most, limit) for most, limit in chunks if most > limit] == []
    assert sum(most == limit for most, limit in chunks) > 10, "the limit is what bounds"


class Capped:
    """A policy that plans one cap for all chunks."""

    traits = PolicyTraits()

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def plan(self, state: StepState) -> StepPlan:
        return StepPlan(run=state.running, admit=state.waiting, prefill_cap=self.cap)


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("cap", [32, 300])
def test_a_planned_cap_is_not_raised_again_and_raises_no_threshold(
    cap: int, is_adaptive: bool
) -> None:
    engine = make_engine(with_threshold(sola_sched.Scheduler, THRESHOLD, is_adaptive))
    scheduler = engine.scheduler
    scheduler.sola_planner = Capped(cap)
    chunks = watched_chunks(engine)
    engine.run(make_workload(20, 100.0))

    assert max(most for most, limit in chunks if limit < 512) <= max(cap, 1)
    assert [pair for pair in chunks if pair[0] > pair[1]] == []
    assert scheduler.scheduler_config.long_prefill_token_threshold == THRESHOLD
    if hasattr(scheduler, "adaptive_long_prefill_threshold"):
        assert scheduler.adaptive_long_prefill_threshold == is_adaptive


@MODES
@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
def test_without_targets_chunks_are_those_of_stock_vllm(is_adaptive: bool, is_async: bool) -> None:
    def steps(scheduler_cls: type[Any]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        engine = make_engine(
            with_threshold(scheduler_cls, THRESHOLD, is_adaptive),
            sola=with_policy("attain", ttft_s=None, tpot_s=None),
            async_scheduling=is_async,
        )
        engine.run(
            make_workload(40), on_step=lambda t: found.append(dict(t.output.num_scheduled_tokens))
        )
        return found

    assert steps(sola_sched.Scheduler) == steps(AsyncScheduler if is_async else Scheduler)


def test_who_sits_out_counts_where_vllm_divides_a_step_by_its_requests() -> None:
    """Nobody's chunk grows because others are hidden for the step."""
    counted: list[tuple[int, int, int]] = []

    class Counting(sola_sched.Scheduler):
        def get_request_counts(self) -> tuple[int, int]:
            counts = super().get_request_counts()
            live = sum(not r.is_finished() for r in self.requests.values())
            counted.append((sum(counts), live, len(self._steering.out_of_sight)))
            return counts

    engine = make_engine(with_threshold(Counting, THRESHOLD, True))
    if not hasattr(engine.scheduler, "adaptive_long_prefill_threshold"):
        pytest.skip("up to 0.30 vLLM divides no step")
    engine.run(make_workload(50))

    assert [(count, live) for count, live, _ in counted if count != live] == []
    assert sum(num_held > 0 for _, _, num_held in counted) > 20


# What must not be split -----------------------------------------------------------------------


@MODES
@POLICIES
def test_no_image_is_split_where_stock_vllm_splits_none(policy: str, is_async: bool) -> None:
    """With `--disable-chunked-mm-input`: parts of an image attend to each other."""

    def num_split(scheduler_cls: type[Any]) -> int:
        def change(arguments: dict[str, Any]) -> None:
            arguments["vllm_config"].scheduler_config.disable_chunked_mm_input = True

        def with_encoder(built: Any) -> None:
            built.max_num_encoder_input_tokens = built.scheduler_config.max_num_batched_tokens
            built.encoder_cache_manager = EncoderCacheManager(cache_size=8192)

        engine = make_engine(
            changed(scheduler_cls, change, with_encoder),
            sola=with_policy(policy),
            async_scheduling=is_async,
            max_num_batched_tokens=8192,
        )
        spans, done = {}, Counter()
        for request in make_workload(60):
            engine.add(request)
            features = list(images(request))
            engine._requests[request.req_id].mm_features = features
            spans[request.req_id] = [f.mm_position.offset for f in features]
        inside: list[tuple[str, int]] = []

        def note(trace: StepTrace) -> None:
            for name, tokens in trace.output.num_scheduled_tokens.items():
                done[name] += tokens
                inside.extend((name, at) for at in spans[name] if at < done[name] < at + IMAGE)

        engine.run(on_step=note)
        assert sum(map(len, spans.values())) > 60
        return len(inside)

    assert num_split(AsyncScheduler if is_async else Scheduler) == 0
    assert num_split(sola_sched.Scheduler) == 0


def seeded_parts(scheduler_cls: type[Any], count: int = 80, **options: Any) -> tuple[int, int]:
    """Steps with a part of what a request with a seed computes first, and preemptions."""
    engine = make_engine(scheduler_cls, **options)
    requests = make_workload(count)
    seeded = {r.req_id for r in requests[::2]}
    for request in requests:
        engine.add(request)
    for name in seeded:
        params = copy.copy(engine._requests[name].sampling_params)
        params.seed, engine._requests[name].sampling_params = 1, params
    parts: list[str] = []

    def note(trace: StepTrace) -> None:
        parts.extend(seeded & trace.output.num_scheduled_tokens.keys() - set(trace.sampling))

    records = engine.run(on_step=note)
    return len(parts), sum(r.num_preemptions for r in records)


def test_stock_vllm_computes_parts_of_prompts_with_seeds() -> None:
    """So what the next test asks for is more than stock vLLM does."""
    assert seeded_parts(Scheduler, max_num_batched_tokens=1024)[0] > 10


@POLICIES
def test_no_step_computes_a_part_of_a_prompt_with_a_seed(policy: str) -> None:
    """On vLLM's CPU build that ends the engine."""
    options = {"sola": with_policy(policy), "max_num_batched_tokens": 1024}

    assert seeded_parts(sola_sched.Scheduler, **options)[0] == 0


def test_nor_where_nothing_is_steered() -> None:
    sola = with_policy("attain", steer=False)

    assert seeded_parts(sola_sched.Scheduler, sola=sola, max_num_batched_tokens=1024)[0] == 0


@POLICIES
@pytest.mark.parametrize(
    "is_swapped",
    [
        pytest.param(False, id="recomputed"),
        pytest.param(True, id="swapped", marks=NEEDS_SWAPPING),
    ],
)
def test_nor_when_one_goes_on_after_a_preemption(policy: str, is_swapped: bool) -> None:
    link: dict[str, Any] = {}
    if is_swapped:
        from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

        link["swap_link"] = LinkSpeed(100_000, 2e8)
    num_parts, num_preemptions = seeded_parts(
        sola_sched.Scheduler,
        sola=with_policy(policy),
        max_num_batched_tokens=1024,
        num_blocks=131,
        **link,
    )

    if policy != "paper":  # which admits by the memory that it predicts
        assert num_preemptions
    assert num_parts == 0


# Who may sit out ------------------------------------------------------------------------------


def with_budgets(
    policy: str,
    *,
    is_async: bool,
    every: int = 3,
    targets: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[VirtualEngine, Counter[tuple[str, bool]]]:
    """Serve requests, some with a thinking budget, and count who has a slot but no token.

    Returns:
        The engine, and how often by ``decode`` or ``prompt out`` and whether it has a budget. As
        ``prompt`` those count after which another may have the place in vLLM's batch: the prompt
        was in the batch before, and the batch has fewer requests now.
    """

    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].reasoning_config = SimpleNamespace()

    engine = make_engine(
        changed(sola_sched.Scheduler, change),
        sola=with_policy(policy, **(targets or {})),
        async_scheduling=is_async,
        **options,
    )
    requests = make_workload(60, 40.0)
    budgeted = {r.req_id for r in requests[::every]}
    for request in requests:
        engine.add(request)
    for name in budgeted:
        params = engine._requests[name].sampling_params
        engine._requests[name].sampling_params = params = copy.copy(params)
        params.thinking_token_budget = 10
    held: Counter[tuple[str, bool]] = Counter()
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    batch: set[str] = set()

    def watched() -> Any:
        nonlocal batch
        had_slots = [(r, r.is_prefill_chunk) for r in scheduler.running]
        output = schedule()
        before, batch = batch, set(output.num_scheduled_tokens)
        for request, is_prompt in had_slots:
            is_done = request.num_output_tokens + request.num_output_placeholders
            if request.is_finished() or is_done >= request.max_tokens:
                continue
            if request in scheduler.running:
                is_held = request.request_id not in batch
                if is_prompt:
                    held["prompt out", request.request_id in budgeted] += is_held
                    is_held &= request.request_id in before and len(batch) < len(before)
                held["prompt" if is_prompt else "decode", request.request_id in budgeted] += is_held
        return output

    scheduler.schedule = watched
    engine.run()
    return engine, held


@MODES
@POLICIES
def test_a_decode_with_a_thinking_budget_sits_no_step_out(policy: str, is_async: bool) -> None:
    """What leaves vLLM's batch hands its budget to the request that takes its place there."""
    _, held = with_budgets(policy, is_async=is_async)

    assert held["decode", True] == 0
    if policy == "attain":
        assert held["decode", False] > 10


@MODES
@POLICIES
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("tokens", [64, 512])
def test_a_prompt_with_one_that_is_computed_in_parts_leaves_no_place_to_others(
    policy: str, is_async: bool, every: int, tokens: int
) -> None:
    """Where as many come as go, vLLM puts those who come into the places, and sets them up."""
    engine, held = with_budgets(
        policy, is_async=is_async, every=every, max_num_batched_tokens=tokens
    )

    assert held["prompt", True] == 0
    assert held["decode", True] == 0
    if policy == "attain" and tokens == 64:
        assert held["prompt out", True] > 10
    config = engine.scheduler.scheduler_config
    assert config.long_prefill_token_threshold == 0, "as the operator has set it"
    assert engine.scheduler.max_num_scheduled_tokens == tokens


@MODES
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_nor_where_nobody_has_a_target(scheduling_policy: str, every: int, is_async: bool) -> None:
    _, held = with_budgets(
        "attain",
        targets={"ttft_s": None, "tpot_s": None},
        is_async=is_async,
        every=every,
        max_num_batched_tokens=256,
        scheduling_policy=scheduling_policy,
    )

    assert held["prompt", True] == 0
    assert held["decode", True] == 0
