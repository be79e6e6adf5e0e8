"""Resets, pauses and sleep clear the caches while swapped KV is loaded, or waits loaded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, TIGHT_BLOCKS, RunResult, make_workload, run
from marks import MODES
from needs import NEEDS_SWAPPING
from swapping import assert_exact, assert_nothing_left_behind, swap
from tiny_llama import write_byte_tokenizer, write_tiny_llama

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]

#: Long enough for 14 actions or more, half as many again as the test takes.
OUTPUT_LEN = 200


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(output_len=OUTPUT_LEN), model_dir)


def reset(core: Any) -> None:
    assert core.reset_prefix_cache(reset_running_requests=True)


def pause(core: Any) -> None:
    core.pause_scheduler(mode="keep", clear_cache=True)
    core.resume_scheduler()


def sleep(core: Any) -> None:
    core.sleep(1, "keep")
    core.wake_up()
    core.resume_scheduler()


def end_all(core: Any) -> None:
    core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()


class Clearing:
    """Clears the caches when it finds requests being loaded and, in turn, loaded ones.

    Attributes:
        num_loading, num_loaded: How many such requests it has found.
    """

    def __init__(self, actions: list[Callable[[Any], None]]) -> None:
        self.num_loading = self.num_loaded = 0
        self._actions = actions
        self._wants_loaded = False

    def __call__(self, core: Any) -> None:
        scheduler = core.scheduler
        held = [r.request_id for r in scheduler.kv_holding_waiting]
        loading = [name for name in held if scheduler.sola_swap.awaits_load(name)]
        num_found = len(held) - len(loading) if self._wants_loaded else len(loading)
        if not num_found or not self._actions:
            return
        if self._wants_loaded:
            self.num_loaded += num_found
        else:
            self.num_loading += num_found
        self._wants_loaded = not self._wants_loaded
        self._actions.pop(0)(core)
        assert not scheduler.kv_holding_waiting
        for request in scheduler.requests.values():
            assert not request.num_computed_tokens


def cleared(actions: list[Callable[[Any], None]], model_dir: Path, **options: Any) -> Any:
    clearing = Clearing(actions)
    result = run(
        requests=make_workload(output_len=OUTPUT_LEN),
        model_dir=model_dir,
        num_blocks=TIGHT_BLOCKS,
        prefix_caching=True,
        at_steps=dict.fromkeys(range(3, 3000), clearing),
        swap_faults={"max_delay_polls": 4, "seed": 1},
        **options,
        **swap(),
    )
    assert clearing.num_loading
    return clearing, result


@pytest.mark.parametrize("is_async", MODES)
def test_resets_pauses_and_sleep_take_back_what_is_loaded(is_async, model_dir, reference) -> None:
    actions = [reset, pause, sleep] * 3
    clearing, result = cleared(actions, model_dir, async_scheduling=is_async)

    assert not actions, "each was called with loads under way, or with loaded requests"
    assert clearing.num_loaded
    assert_exact(result, reference)


def test_requests_that_end_while_they_are_loaded_do_not_hold_up_a_reset(model_dir) -> None:
    actions = [end_all]
    _, result = cleared(actions, model_dir)

    assert not actions
    assert len(result.finish_reasons) < 24, "the others were ended"
    assert_nothing_left_behind(result)


@pytest.mark.slow
@pytest.mark.long
def test_a_server_is_paused_again_and_again_while_it_swaps(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    write_byte_tokenizer(folder)

    num_paused, reasons = asyncio.run(pause_while_serving(folder))

    assert num_paused >= 10
    assert reasons == ["length"] * 40


async def pause_while_serving(folder: Path) -> tuple[int, list[str]]:
    """Pauses that succeeded, each of which empties the caches, and how the requests ended."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        num_gpu_blocks_override=TIGHT_BLOCKS,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        **swap(),
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 250) for _ in range(rng.randrange(20, 120))] for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    llm = AsyncLLM.from_engine_args(options)

    async def answered(number: int) -> str:
        prompt: Any = {"prompt_token_ids": prompts[number]}
        outputs = [output async for output in llm.generate(prompt, params, f"r{number}")]
        return str(outputs[-1].outputs[0].finish_reason)

    try:
        answers = [asyncio.create_task(answered(number)) for number in range(40)]
        num_paused = 0
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0.1)
            await llm.pause_generation(mode="keep", clear_cache=True)
            await llm.resume_generation()
            num_paused += 1
        return num_paused, await asyncio.gather(*answers)
    finally:
        llm.shutdown()
