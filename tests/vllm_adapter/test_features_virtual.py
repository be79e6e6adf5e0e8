"""Features of vLLM that need no model: the real schedulers in virtual time."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from image_prompts import IMAGE, images
from loaded_engine import (
    BLOCK_SIZE,
    MODES,
    NO_TARGETS,
    NUM_BLOCKS,
    changed,
    make_engine,
    make_workload,
    with_policy,
    with_remote_kv,
)
from vllm.config import KVTransferConfig, MultiModalConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

import sola_sched
from sola_sched.simulator import StepTrace, VirtualEngine, VirtualRequest
from sola_sched.simulator.host import stock_scheduler_cls
from sola_sched.vllm_adapter import scheduler
from sola_sched.vllm_adapter.support import ENCODER_ONLY, PIPELINE
from sola_sched.vllm_adapter.versions import Seams

pytestmark = pytest.mark.vllm


def assert_all_served(engine: VirtualEngine, requests: list[VirtualRequest]) -> None:
    records = {r.req_id: r for r in engine.records}
    assert {name: r.num_output_tokens for name, r in records.items()} == {
        r.req_id: r.output_len for r in requests
    }
    assert engine.num_free_blocks == NUM_BLOCKS - 1


# Pipeline parallel ----------------------------------------------------------------------------


@pytest.mark.parametrize(("stock_cls", "is_async"), [(AsyncScheduler, True), (Scheduler, False)])
def test_with_pipeline_parallelism_every_step_is_stock_vllms_and_the_log_warns(
    stock_cls: type[Any], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].parallel_config.pipeline_parallel_size = 2

    def steps(scheduler_cls: type[Any]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        engine = make_engine(changed(scheduler_cls, change), async_scheduling=is_async)
        engine._depth = 2  # two batches in flight
        requests = make_workload()
        engine.run(
            requests,
            on_step=lambda trace: found.append(dict(trace.output.num_scheduled_tokens)),
        )
        assert_all_served(engine, requests)
        return found

    warned: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *args: warned.append(text % args))

    assert steps(sola_sched.Scheduler) == steps(stock_cls)
    assert warned == [f"sola_sched: not steered, vLLM's own order: {PIPELINE}"]


# Data and expert parallel ---------------------------------------------------------------------


def throttled(engine: VirtualEngine, interval: int = 4) -> list[bool]:
    """As vLLM's data parallel core: prefills start at every fourth step only."""
    schedule, steps = engine.scheduler.schedule, []

    def with_throttle() -> Any:
        steps.append(len(steps) % interval != 0)
        return schedule(steps[-1])

    engine.scheduler.schedule = with_throttle
    return steps


@MODES
def test_steps_that_put_prefills_off_are_stock_vllms(is_async: bool) -> None:
    def steps(scheduler_cls: type[Any]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        engine = make_engine(scheduler_cls, sola=NO_TARGETS, async_scheduling=is_async)
        throttled(engine)
        engine.run(
            make_workload(),
            on_step=lambda trace: found.append(dict(trace.output.num_scheduled_tokens)),
        )
        return found

    stock = steps(AsyncScheduler)
    assert steps(sola_sched.Scheduler) == stock
    plain = make_engine(AsyncScheduler, async_scheduling=is_async)
    plain.run(make_workload())
    assert plain.num_steps != len(stock), "putting prefills off makes a difference"


@MODES
@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_all_are_served_while_prefills_are_put_off(policy: str, is_async: bool) -> None:
    sola = with_policy(policy)
    engine = make_engine(sola_sched.Scheduler, sola=sola, async_scheduling=is_async)
    steps = throttled(engine)
    requests = make_workload()
    engine.run(requests)

    assert sum(steps) > 100
    assert_all_served(engine, requests)


def test_expert_parallelism_changes_no_step() -> None:
    def steps(expert_parallel: bool) -> list[dict[str, int]]:
        def change(arguments: dict[str, Any]) -> None:
            parallel = arguments["vllm_config"].parallel_config
            parallel.enable_expert_parallel = expert_parallel
            parallel.data_parallel_size = 2 if expert_parallel else 1

        found: list[dict[str, int]] = []
        engine = make_engine(changed(sola_sched.Scheduler, change))
        assert str(engine.scheduler.sola_support) == "steered"
        engine.run(
            make_workload(),
            on_step=lambda trace: found.append(dict(trace.output.num_scheduled_tokens)),
        )
        return found

    assert steps(True) == steps(False)


@pytest.mark.parametrize("policy", ["attain", "alise"])
def test_blocks_that_several_ranks_share_are_counted_as_vllm_counts_them(policy: str) -> None:
    """With decode context parallelism a block has tokens on each rank, and memory is scarce."""
    num_blocks = 130

    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].parallel_config.decode_context_parallel_size = 2
        arguments["block_size"] = 2 * BLOCK_SIZE

    engine = make_engine(
        changed(sola_sched.Scheduler, change), sola=with_policy(policy), num_blocks=num_blocks
    )
    scheduler = engine.scheduler
    assert (str(scheduler.sola_support), scheduler.block_size) == ("steered", 2 * BLOCK_SIZE)
    requests = make_workload()
    engine.run(requests)

    assert scheduler.sola_stats()["num_held"] or policy == "alise"
    assert engine.num_free_blocks == num_blocks - 1
    assert [r.num_output_tokens for r in engine.records] == [r.output_len for r in requests]
    assert not scheduler.sola_guard.num_failures


# Encoders -------------------------------------------------------------------------------------

#: Embeddings that one step may compute, that the cache holds, and of an image.
ENCODER_BUDGET, ENCODER_CACHE = 200, 300


@MODES
def test_encoder_budgets_are_kept_and_nothing_is_left_in_the_cache(is_async: bool) -> None:
    def with_encoder(built: Any) -> None:
        built.max_num_encoder_input_tokens = ENCODER_BUDGET
        built.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODER_CACHE)

    engine = make_engine(
        changed(sola_sched.Scheduler, lambda arguments: None, with_encoder),
        async_scheduling=is_async,
    )
    requests = make_workload(80)
    for request in requests:
        engine.add(request)
        engine._requests[request.req_id].mm_features = list(images(request))
    spent: list[int] = []

    def note(trace: StepTrace) -> None:
        encoded = trace.output.scheduled_encoder_inputs
        spent.append(IMAGE * sum(map(len, encoded.values())))

    engine.run(on_step=note)

    assert max(spent) <= ENCODER_BUDGET
    assert sum(spent) >= IMAGE * 60
    assert engine.scheduler.encoder_cache_manager.num_freeable_slots == ENCODER_CACHE
    assert_all_served(engine, requests)


class EncodingEngine(VirtualEngine):
    """Its model has no language part: no token is sampled."""

    def _sample(self, trace: StepTrace) -> Any:
        output = super()._sample(trace)
        output.sampled_token_ids = [[] for _ in output.req_ids]
        return output


def encoder_only(arguments: dict[str, Any]) -> None:
    """As vLLM sets up an instance that only encodes: no KV cache, and no whole prompts either."""
    config = arguments["vllm_config"]
    model = config.model_config = copy.copy(config.model_config)
    model.multimodal_config = MultiModalConfig(mm_encoder_only=True)
    config.scheduler_config.enable_chunked_prefill = False
    arguments["kv_cache_config"] = KVCacheConfig(1, kv_cache_tensors=[], kv_cache_groups=[])


@MODES
def test_an_instance_that_only_encodes_is_stock_vllms_step_by_step(is_async: bool) -> None:
    def steps(scheduler_cls: type[Any]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        engine = make_engine(
            changed(scheduler_cls, encoder_only),
            EncodingEngine,
            async_scheduling=is_async,
            enable_prefix_caching=False,
            max_num_batched_tokens=1024,  # up to 0.30 longer prompts wait for ever there
        )
        if scheduler_cls is sola_sched.Scheduler:
            assert engine.scheduler.sola_support.own_order == ENCODER_ONLY
        requests = make_workload()
        engine.run(
            requests,
            on_step=lambda trace: found.append(dict(trace.output.num_scheduled_tokens)),
        )
        assert {r.finish_reason for r in engine.records} == {"stop"}
        return found

    stock = stock_scheduler_cls(async_scheduling=is_async)
    assert steps(sola_sched.Scheduler) == steps(stock)


# Hybrid models --------------------------------------------------------------------------------

#: Larger than the chunks that plans would make.
STATE_BLOCK = 128


@MODES
@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_chunks_of_hybrid_models_end_where_state_is_kept(policy: str, is_async: bool) -> None:
    def change(arguments: dict[str, Any]) -> None:
        cache = arguments["vllm_config"].cache_config
        cache.mamba_cache_mode = "align"
        layers = arguments["kv_cache_config"] = copy.copy(arguments["kv_cache_config"])
        state = MambaSpec(
            block_size=STATE_BLOCK,
            shapes=((8, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        layers.kv_cache_groups = [*layers.kv_cache_groups, KVCacheGroupSpec(["state"], state)]

    sola = with_policy(policy)
    engine = make_engine(
        changed(sola_sched.Scheduler, change),
        sola=sola,
        block_size=STATE_BLOCK,
        enable_prefix_caching=True,
        async_scheduling=is_async,
    )
    requests = make_workload(60)
    computed = dict.fromkeys((r.req_id for r in requests), 0)
    length = {r.req_id: r.num_prompt_tokens for r in requests}
    ends: list[int] = []

    def note(trace: StepTrace) -> None:
        for name, num_tokens in trace.output.num_scheduled_tokens.items():
            computed[name] += num_tokens
            if computed[name] < length[name]:
                ends.append(computed[name])

    engine.run(requests, on_step=note)

    assert engine.scheduler.need_mamba_block_aligned_split
    assert len(ends) > 50
    assert all(end % STATE_BLOCK == 0 for end in ends)
    assert_all_served(engine, requests)


# Prefill and decode apart ---------------------------------------------------------------------


def _multi(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(parts)},
    }  # fmt: skip


@MODES
@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_kv_that_another_engine_computed_is_awaited(policy: str, is_async: bool) -> None:
    """Decode side: half of the prompts come from elsewhere; none of their tokens is computed."""
    sola = with_policy(policy)
    engine = with_remote_kv(sola_sched.Scheduler, sola=sola, async_scheduling=is_async)
    requests = make_workload()
    for request in requests:
        engine.add(request)
    remote = {r.req_id for r in requests[::2]}
    for name in remote:
        engine._requests[name].kv_transfer_params = {"do_remote_prefill": True}
    first: dict[str, int] = {}

    def note(trace: StepTrace) -> None:
        for name, num_tokens in trace.output.num_scheduled_tokens.items():
            first.setdefault(name, num_tokens)

    engine.run(on_step=note)

    assert "RemoteKV" in str(engine.scheduler.sola_support)
    assert {first[name] for name in remote} == {1}
    assert_all_served(engine, requests)


@pytest.mark.parametrize(
    ("transfer", "awaits"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, True),
        ({"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}, True),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, False),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, False),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, False),
        ({"kv_connector": "Ours", "kv_connector_module_path": "m", "kv_role": "kv_both"}, True),
        (_multi({"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}), True),
        (_multi({"kv_connector": "OffloadingConnector"}), False),
    ],
)
def test_a_client_says_in_vain_that_another_engine_has_its_prompt_where_none_sends_it(
    transfer: dict[str, Any], awaits: bool
) -> None:
    engine = make_engine(sola_sched.Scheduler)
    engine.scheduler.vllm_config.kv_transfer_config = KVTransferConfig(**transfer)
    seams = Seams(engine.scheduler)
    request = SimpleNamespace(
        num_computed_tokens=0, num_prompt_tokens=1000,
        kv_transfer_params={"do_remote_prefill": True},
    )  # fmt: skip
    assert seams.num_awaited_tokens(request) == (999 if awaits else 0)


@MODES
@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_blocks_are_held_until_another_engine_has_them(policy: str, is_async: bool) -> None:
    """Prefill side: one token each, and the blocks stay for a while after the end."""
    sola = with_policy(policy)
    engine = with_remote_kv(sola_sched.Scheduler, sola=sola, async_scheduling=is_async)
    requests = [
        VirtualRequest(r.req_id, r.arrival_s, prompt_len=r.num_prompt_tokens, output_len=1)
        for r in make_workload()
    ]
    for request in requests:
        engine.add(request)
        engine._requests[request.req_id].kv_transfer_params = {"do_remote_decode": True}
    held: list[int] = []
    engine.run(on_step=lambda trace: held.append(len(engine.scheduler.connector.sending)))

    assert max(held) > 0
    assert_all_served(engine, requests)


@MODES
@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("policy", ["attain", "alise"])
def test_nobody_is_refused_for_a_prompt_that_another_engine_has_computed(
    policy: str, caches_prefixes: bool, is_async: bool
) -> None:
    """Each would take longer than its target to compute here, and needs one token."""
    engine = with_remote_kv(
        sola_sched.Scheduler,
        sola=with_policy(policy, ttft_s=0.15, tpot_s=0.05, overload="reject"),
        async_scheduling=is_async,
        enable_prefix_caching=caches_prefixes,
        num_blocks=4001,
        max_num_seqs=8,
    )
    scheduler, table = engine.scheduler, engine.scheduler.sola_monitor.table
    engine.run([VirtualRequest(f"w{i}", 0.1 * i, 4, prompt_len=20 + 12 * i) for i in range(40)])
    now_s = engine.clock.now
    names = [f"r{i}" for i in range(20)]
    for i, name in enumerate(names):
        engine.add(VirtualRequest(name, now_s + 0.05 + 0.1 * i, 20, prompt_len=1900))
        engine._requests[name].kv_transfer_params = {"do_remote_prefill": True}
    expected: set[int] = set()

    def note(trace: StepTrace) -> None:
        waiting = [r for r in scheduler.waiting if r.kv_transfer_params["do_remote_prefill"]]
        expected.update(int(table.num_computed[table.row_of[r.request_id]]) for r in waiting)

    engine.run(on_step=note)

    assert expected <= {1899}
    assert scheduler.sola_stats()["num_rejected"] == 0
    assert [engine.record(name).num_output_tokens for name in names] == [20] * 20
    assert scheduler.sola_stats()["failures"] == {}


def test_beside_a_connector_only_those_that_are_late_are_refused() -> None:
    """What it finds of a prompt is known when the request is admitted."""
    engine = with_remote_kv(
        sola_sched.Scheduler,
        sola=with_policy("attain", ttft_s=0.15, tpot_s=0.05, overload="reject"),
    )
    scheduler = engine.scheduler
    engine.run([VirtualRequest(f"w{i}", 0.1 * i, 4, prompt_len=20 + 12 * i) for i in range(40)])
    now_s = engine.clock.now
    for i in range(20):
        engine.add(VirtualRequest(f"r{i}", now_s + 0.01 * i, 20, prompt_len=1900))
    table, early = scheduler.sola_monitor.table, []
    reject = scheduler._rejecting.reject

    def watched(requests: Any) -> None:
        requests = list(requests)
        due_s = [table.due_s[table.row_of[request.request_id]] for request in requests]
        early.extend(due for due in due_s if due > engine.clock.now + 0.2)
        reject(requests)

    scheduler._rejecting.reject = watched
    engine.run()

    assert scheduler.sola_stats()["num_rejected"] > 10
    assert early == []
