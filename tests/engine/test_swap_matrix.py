"""Swapping in every combination: runners, tensor parallelism, block sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, RunResult, make_workload, run, run_on_v2
from needs import NEEDS_SWAPPING
from swapping import assert_exact, assert_nothing_left_behind, swap

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(30), model_dir)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "is_async"),
    [
        (32, 17, True),
        (256, 3, False),
        *(
            pytest.param(size, number, is_async, marks=pytest.mark.long)
            for size, number in ((32, 17), (64, 9), (96, 9), (128, 5), (256, 3))
            for is_async in (False, True)
            if (size, is_async) not in ((32, True), (256, False))
        ),
    ],
)
def test_smallest_cache_that_vllm_accepts(block_size, num_blocks, is_async, model_dir, reference):
    """One request at its longest fills the cache: everything else must give way."""
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        async_scheduling=is_async,
        block_size=block_size,
        num_blocks=num_blocks,
        **swap(),
    )

    assert_exact(result, reference)
    assert result.num_recomputed == 0


@pytest.mark.parametrize(
    ("mode", "caching"),
    [
        ("raw", True),
        pytest.param("int8", True, marks=pytest.mark.long),
        pytest.param("raw", False, marks=pytest.mark.long),
        pytest.param("int8", False, marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_2(mode, caching, model_dir, reference):
    """Each of the two workers, processes of their own, has a part of the heads."""
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        prefix_caching=caching,
        num_blocks=20,
        tensor_parallel_size=2,
        **swap(mode=mode),
    )

    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert_nothing_left_behind(result)
    if mode == "raw":
        assert_exact(result, reference)


#: Asynchronous scheduling and prefix caching.
V2_CASES = {"both": [(True, True)], "others": [(False, False), (False, True), (True, False)]}


@pytest.fixture(scope="module")
def v2_results(model_dir: Path) -> Callable[[str], list[RunResult]]:
    """Stock vLLM, cases of swapping, with the others one that must fail, in one subprocess."""

    @cache
    def results_of(which: str) -> list[RunResult]:
        requests = make_workload(12, output_len=60)  # steps are slow, see `run_on_v2`
        cases: list[dict[str, Any]] = [{"scheduler_cls": STOCK, "requests": requests}]
        scarce = {"requests": requests, "num_blocks": 20}
        for is_async, caching in V2_CASES[which]:
            mode = {"async_scheduling": is_async, "prefix_caching": caching}
            cases.append(scarce | mode | swap())
        if which == "others":
            cases.append(scarce | {"swap_faults": {"zeroed": True}} | swap())
        return run_on_v2(cases, model_dir)

    return results_of


@pytest.mark.parametrize("which", ["both", pytest.param("others", marks=pytest.mark.long)])
def test_v2_runner(which, v2_results):
    stock, *results = v2_results(which)

    for result in results[: len(V2_CASES[which])]:
        assert result.num_preemptions >= 3
        assert result.num_recomputed == 0
        assert_exact(result, stock)


@pytest.mark.long
def test_v2_runner_depends_on_what_comes_back(v2_results):
    """Negative control; that of the other runner is in `test_swap`."""
    results = v2_results("others")

    assert results[-1].tokens != results[0].tokens
