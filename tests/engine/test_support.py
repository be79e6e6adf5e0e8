"""Rows of `docs/support.md` on the real engine: the same tokens as stock vLLM, and nothing lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from engine_harness import STOCK, TIGHT_BLOCKS, EngineRequest, RunResult, make_workload, run
from marks import MODES
from needs import NEEDS_SWAPPING
from tiny_llama import write_byte_tokenizer, write_tiny_llama
from vllm import LLM

pytestmark = pytest.mark.vllm

SOLA = {"sola_sched": {"ttft_s": 0.2, "tpot_s": 0.012, "log_interval_s": 0}}
OURS: dict[str, Any] = {"scheduler_cls": "sola_sched.Scheduler", "additional_config": SOLA}
SMALL: dict[str, Any] = {"num_requests": 16, "output_len": 60}


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(**SMALL), model_dir)


def assert_served_as(reference: RunResult, result: RunResult) -> None:
    assert result.finish_reasons == reference.finish_reasons
    assert result.tokens == reference.tokens
    assert (result.num_leaked_blocks, result.swap_problems) == (0, [])


Action = Callable[[Any], object]


def interrupted(actions: Mapping[int, Action], model_dir: Path, **options: Any) -> RunResult:
    return run(
        requests=make_workload(**SMALL),
        model_dir=model_dir,
        num_blocks=TIGHT_BLOCKS,
        prefix_caching=True,
        at_steps=actions,
        **OURS,
        **options,
    )


@pytest.mark.parametrize("is_async", MODES)
def test_a_paused_engine_goes_on_where_it_was(is_async, model_dir, reference) -> None:
    idle: list[int] = []

    def pause(core: Any) -> None:
        core.pause_scheduler(mode="keep", clear_cache=False)

    def look(core: Any) -> None:
        assert core.is_scheduler_paused()
        idle.append(len(core.scheduler.requests))

    def resume(core: Any) -> None:
        core.resume_scheduler()

    actions: dict[int, Action] = {20: pause, 30: look, 45: resume}
    result = interrupted(actions, model_dir, async_scheduling=is_async)

    assert idle[0] > 4
    assert_served_as(reference, result)


@pytest.mark.parametrize("is_async", MODES)
def test_an_engine_that_slept_computes_again_what_it_dropped(
    is_async, model_dir, reference
) -> None:
    def sleep(core: Any) -> None:
        core.sleep(1, "keep")

    def wake_up(core: Any) -> None:
        core.wake_up()
        core.resume_scheduler()

    result = interrupted({30: sleep, 50: wake_up}, model_dir, async_scheduling=is_async)

    assert_served_as(reference, result)
    assert result.num_recomputed > 100


@pytest.mark.parametrize("is_async", MODES)
@pytest.mark.parametrize("running", [False, True], ids=["cache", "running"])
def test_a_reset_of_the_prefix_cache_changes_no_token(
    running, is_async, model_dir, reference
) -> None:
    done: list[bool] = []

    def reset(core: Any) -> None:
        done.append(core.reset_prefix_cache(reset_running_requests=running))

    result = interrupted({25: reset, 60: reset}, model_dir, async_scheduling=is_async)

    assert done == [running] * 2, "vLLM refuses while requests run, unless they are reset too"
    assert_served_as(reference, result)


def sessions(count: int) -> list[EngineRequest]:
    """Sessions of three inputs that arrive while earlier ones run, beside other requests."""
    others = make_workload(**SMALL)
    inputs = make_workload(3 * count, output_len=20, seed=7)
    parts = []
    for i in range(count):
        for k in range(4):
            prompt = inputs[3 * i + k].prompt if k < 3 else (5,)
            parts.append(
                EngineRequest(f"s{i}", prompt, 20, arrival_step=2 * i + 12 * k, resumable=k < 3)
            )
    return [*others, *parts]


@pytest.mark.parametrize("is_async", MODES)
def test_inputs_that_stream_in_are_answered_as_by_stock(is_async, model_dir) -> None:
    requests = sessions(4)
    stock = run(STOCK, requests, model_dir, async_scheduling=is_async)
    result = run(
        requests=requests,
        model_dir=model_dir,
        async_scheduling=is_async,
        num_blocks=TIGHT_BLOCKS + 8,
        **OURS,
    )

    assert all(len(stock.tokens[f"s{i}"]) == 3 * 20 for i in range(4))
    assert_served_as(stock, result)


@pytest.mark.parametrize("is_async", MODES)
@pytest.mark.parametrize("swaps", [False, pytest.param(True, marks=NEEDS_SWAPPING)])
def test_sessions_that_go_on_together_in_full_memory_are_answered_as_with_plenty(
    swaps, is_async, model_dir
) -> None:
    """Stock vLLM waits for ever here: each session holds KV that another one lacks."""
    tokens = itertools.cycle(token for r in make_workload(**SMALL) for token in r.prompt)
    requests = [
        EngineRequest(f"s{i}", tuple(itertools.islice(tokens, length)), 20, 60 * k, resumable=k < 2)
        for i in range(3)
        for k, length in enumerate((180, 120, 1))
    ]
    sola = {**SOLA["sola_sched"], "swap": {"always": True} if swaps else {"mode": "off"}}

    plenty = run(STOCK, requests, model_dir, async_scheduling=is_async)
    result = run(
        OURS["scheduler_cls"],
        requests,
        model_dir,
        async_scheduling=is_async,
        num_blocks=24,
        additional_config={"sola_sched": sola},
    )

    assert all(len(plenty.tokens[f"s{i}"]) == 2 * 20 for i in range(3))
    assert_served_as(plenty, result)
    assert result.stats["num_kv_given_back"] >= 1
    if swaps:
        assert result.stats["swap"]["num_loaded"] >= 180 + 20 - 1  # of one session at least
    else:
        assert result.num_recomputed >= 180 + 20 - 1


def test_pooling_models_run_in_vllms_order(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "pooling")
    write_byte_tokenizer(folder)
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in make_workload(20)]

    def embed(scheduler_cls: str | None) -> torch.Tensor:
        llm = LLM(
            model=str(folder),
            runner="pooling",
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=64 << 20,
            scheduler_cls=scheduler_cls,
            additional_config=SOLA if scheduler_cls else {},
        )
        try:
            outputs = llm.embed(prompts, use_tqdm=False)
            if scheduler_cls:
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler
                assert "pooling" in scheduler.sola_support.own_order
                assert not scheduler.requests
        finally:
            llm.llm_engine.engine_core.shutdown()
        return torch.tensor([output.outputs.embedding for output in outputs])

    stock = embed(None)

    assert torch.equal(embed("sola_sched.Scheduler"), stock)
    assert stock.std(dim=0).max() > 0.01, "the prompts make a difference"
