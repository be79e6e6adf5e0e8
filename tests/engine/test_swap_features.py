"""Swapping beside features of vLLM: adapters, draft tokens, fp8 and latent caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from engine_harness import (
    STOCK,
    EngineRequest,
    RunResult,
    make_workload,
    num_different,
    run,
    run_apart,
)
from needs import NEEDS_SWAPPING
from swapping import assert_exact, assert_nothing_left_behind, swap
from tiny_deepseek import write_tiny_deepseek
from tiny_llama import write_adapter
from vllm.v1.attention.backends.registry import AttentionBackendEnum

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING, pytest.mark.slow, pytest.mark.timeout(900)]

#: Blocks that make vLLM preempt at least 20 times.
SCARCE = 20


@pytest.mark.parametrize(
    "faults",
    [pytest.param(None, marks=pytest.mark.long), {"max_delay_polls": 4, "seed": 3}],
    ids=["", "late"],
)
def test_lora(faults: dict[str, Any] | None, model_dir: Path, tmp_path: Path) -> None:
    """Whoever's KV comes back while others are held needs a slot for its adapter too."""
    folders = [str(write_adapter(tmp_path / f"a{i}", i)) for i in range(3)]
    requests = [
        replace(request, adapter=(i % 3 + 1, folders[i % 3]))
        for i, request in enumerate(make_workload(30))
    ]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}

    plain = run(STOCK, make_workload(30), model_dir)
    expected = run(STOCK, requests, model_dir, **options)
    result = run(
        requests=requests,
        model_dir=model_dir,
        num_blocks=SCARCE,
        swap_faults=faults,
        **options,
        **swap(),
    )

    assert num_different(expected, plain) > 1000, "the adapters make a difference"
    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert_exact(result, expected)


#: Copies words of the prompt; most drafts are wrong, and their KV is written and overwritten.
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.mark.long  # `test_swap` has drafts in flight at preemptions
def test_draft_tokens(model_dir: Path) -> None:
    result, expected = with_drafts(model_dir)

    assert result.num_recomputed > 500, "wrong drafts were overwritten"
    assert result.num_preemptions >= 20
    assert result.stats["swap"]["num_loaded"] > 500
    assert_exact(result, expected)


@pytest.mark.long
def test_draft_tokens_depend_on_what_comes_back(model_dir: Path) -> None:
    """Negative control."""
    result, expected = with_drafts(model_dir, swap_faults={"zeroed": True})

    assert num_different(result, expected) > 200


def with_drafts(model_dir: Path, **options: Any) -> tuple[RunResult, RunResult]:
    """With draft tokens and swapping, and stock vLLM without either.

    The first in a process of its own: vLLM on CPUs starts one drafting engine per process only.
    """
    requests = [repeating(request) for request in make_workload(60)]
    case = {"requests": requests, "num_blocks": SCARCE, "speculative_config": DRAFTS}
    (result,) = run_apart([case | options | swap()], model_dir)
    return result, run(STOCK, requests, model_dir)


def repeating(request: EngineRequest) -> EngineRequest:
    """The request with a prompt of as many tokens, a repetition of its first twelve."""
    prompt = request.prompt
    return replace(request, prompt=(prompt[:12] * len(prompt))[: len(prompt)])


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache on CPUs needs AVX-512"
)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("fp8_e4m3", "raw"),
        ("fp8_e5m2", "int8"),
        pytest.param("fp8_e4m3", "int8", marks=pytest.mark.long),
        pytest.param("fp8_e5m2", "raw", marks=pytest.mark.long),
    ],
)
def test_fp8_cache_is_swapped_as_it_is(dtype: str, mode: str, model_dir: Path) -> None:
    requests = make_workload(30)
    expected = run(STOCK, requests, model_dir, kv_cache_dtype=dtype)

    result = run(
        requests=requests,
        model_dir=model_dir,
        num_blocks=SCARCE,
        kv_cache_dtype=dtype,
        **swap(mode=mode),
    )

    assert result.stats["swap"]["mode"] == "raw"
    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert_exact(result, expected)


#: Half a step of INT8, 1 / 255 of a group's range, and what fp16 scales and offsets add.
HALF_STEP = 0.51 / 255


@pytest.mark.parametrize(("mode", "largest"), [("raw", 0.0), ("int8", HALF_STEP)])
def test_latent_attention(mode: str, largest: float, tmp_path: Path) -> None:
    result = with_latent_attention(tmp_path, mode)

    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert result.num_kv_compared > 1000
    assert result.largest_kv_error <= largest
    assert (result.largest_kv_error == 0.0) == (mode == "raw")
    assert_nothing_left_behind(result)


def test_latent_attention_depends_on_what_comes_back(tmp_path: Path) -> None:
    """Negative control."""
    result = with_latent_attention(tmp_path, "raw", swap_faults={"zeroed": True})

    assert result.largest_kv_error > 0.5


def with_latent_attention(tmp_path: Path, mode: str, **options: Any) -> RunResult:
    """KV is compared: tokens cannot tell, since vLLM's MLA on CPUs depends on the batch.

    On processors with AMX vLLM takes a backend that refuses the float32 of these tests.
    """
    if "CPU_MLA" in AttentionBackendEnum.__members__:
        options["attention_backend"] = "CPU_MLA"
    return run(
        requests=make_workload(30),
        model_dir=write_tiny_deepseek(tmp_path / "deepseek"),
        num_blocks=2 * SCARCE,
        block_size=16,
        watches_kv=True,
        **options,
        **swap(mode=mode),
    )
