"""Swapping in every combination: runners, tensor parallelism, block sizes, faults."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import RunResult, make_workload, run, run_on_v2
from needs import NEEDS_SWAPPING
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING, pytest.mark.slow, pytest.mark.timeout(1800)]

STOCK = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
NO_SLO = {"ttft_s": None, "tpot_s": None, "log_interval_s": 0}
#: Of the fault test, as many as CI has time for; 100 take a quarter of an hour.
NUM_SEEDS = int(os.environ.get("SOLA_SCHED_SWAP_SEEDS", "25"))


def swap(scheduler_cls: str = "sola_sched.Scheduler", **options: Any) -> dict[str, Any]:
    sola = {**NO_SLO, "swap": {"always": True, **options}}
    return {"scheduler_cls": scheduler_cls, "additional_config": {"sola_sched": sola}}


def assert_exact(result: RunResult, reference: RunResult) -> None:
    """The same tokens, those before an abort included, and nothing left behind."""
    for name, expected in reference.tokens.items():
        tokens = result.tokens[name]
        is_aborted = result.finish_reasons[name] == "abort"
        assert tokens == (expected[: len(tokens)] if is_aborted else expected), name
    assert (result.num_leaked_blocks, result.swap_problems) == (0, [])


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(30), model_dir)


@pytest.mark.parametrize(
    ("block_size", "num_blocks"), [(32, 17), (64, 9), (96, 9), (128, 5), (256, 3)]
)
@pytest.mark.parametrize("is_async", [False, True])
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


@pytest.mark.parametrize("mode", ["raw", "int8"])
@pytest.mark.parametrize("caching", [False, True])
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
    assert (result.num_leaked_blocks, result.swap_problems) == (0, [])
    if mode == "raw":
        assert_exact(result, reference)


V2_CASES = list(product((False, True), (False, True)))


@pytest.fixture(scope="module")
def v2_results(model_dir: Path) -> list[RunResult]:
    """Stock vLLM, then each case of swapping, then one that must fail, in one subprocess."""
    requests = make_workload(30)
    cases: list[dict[str, Any]] = [{"scheduler_cls": STOCK, "requests": requests}]
    scarce = {"requests": requests, "num_blocks": 20}
    for is_async, caching in V2_CASES:
        mode = {"async_scheduling": is_async, "prefix_caching": caching}
        cases.append(scarce | mode | swap())
    cases.append(scarce | {"swap_faults": {"zeroed": True}} | swap())
    return run_on_v2(cases, model_dir)


@pytest.mark.parametrize("index", range(len(V2_CASES)))
def test_v2_runner(index, v2_results):
    result = v2_results[index + 1]

    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert_exact(result, v2_results[0])


def test_v2_runner_depends_on_what_comes_back(v2_results):
    """Negative control."""
    assert v2_results[-1].tokens != v2_results[0].tokens


def disturbed(seed: int) -> dict[str, Any]:
    """Late and failing copies, aborts in every state, scarce host memory; a random engine."""
    rng = random.Random(seed)
    requests = make_workload(20, output_len=60, seed=seed, num_aborts=8)
    # Aborts anywhere in a request's life, some of them while it waits or is being copied.
    requests = [
        r if r.abort_step is None else replace(r, abort_step=r.arrival_step + rng.randrange(200))
        for r in requests
    ]
    faults = {
        "max_delay_polls": rng.choice((1, 2, 4)),
        "fail_ratio": rng.choice((0.0, 0.1, 0.3)),
        "num_host_slots": rng.choice((None, 4, 12)),
        "preempted_share": rng.choice((0.0, 0.0, 0.05)),
        "seed": seed,
    }
    scheduler_cls = rng.choice(("sola_sched.Scheduler", "chaos.ChaosScheduler"))
    options = swap(scheduler_cls, segment_tokens=rng.choice((32, 256)))
    options["additional_config"]["chaos"] = seed
    return {
        "requests": requests,
        "async_scheduling": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.5,
        "num_blocks": rng.choice((17, 19, 22, 60)),
        "max_num_seqs": rng.choice((4, 16)),
        "swap_faults": faults,
        **options,
    }


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_fault_shows_in_a_token_or_stays_behind(seed, model_dir):
    arguments = disturbed(seed)
    spared = [replace(r, abort_step=None) for r in arguments["requests"]]

    assert_exact(run(model_dir=model_dir, **arguments), run(STOCK, spared, model_dir))
