"""Swapped requests continue as if they had never lost their place (fp32, real engine).

Scarce memory forces preemptions; the output is compared, token by token, with stock vLLM that
never preempts. Restored KV that is wrong in one block shows as a different continuation, which
the negative controls prove.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, EngineRequest, RunResult, make_workload, num_different, run
from marks import LONG
from needs import NEEDS_SWAPPING
from swapping import assert_exact, assert_nothing_left_behind, swap
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]

#: Blocks that make vLLM preempt at least 20 times.
SCARCE = 20


@pytest.fixture(scope="session")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model: sliding-window attention below, full attention above."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("windowed_llama"),
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=48,
    )


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> RunResult:
    result = run(STOCK, make_workload(30), model_dir)
    assert result.num_preemptions == 0
    return result


@pytest.fixture(scope="session")
def windowed_reference(windowed_dir: Path) -> RunResult:
    result = run(STOCK, make_workload(30), windowed_dir)
    assert result.num_preemptions == 0
    return result


@pytest.mark.parametrize(
    ("is_async", "caching"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=LONG),
        pytest.param(False, True, marks=LONG),
    ],
)
def test_preempted_requests_recompute_nothing_and_keep_their_tokens(
    is_async, caching, model_dir, reference
):
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        async_scheduling=is_async,
        prefix_caching=caching,
        num_blocks=SCARCE,
        **swap(),
    )

    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert num_different(result, reference) == 0
    assert_nothing_left_behind(result)


@pytest.mark.slow
def test_drafts_in_flight_at_a_preemption_are_not_copied(model_dir, tmp_path):
    """They may be rejected: a copy that was made of them would be taken for what replaced them."""
    requests = make_workload(8, output_len=60)
    drafter = write_tiny_llama(tmp_path / "drafter", rope_theta=100.0)  # rarely right
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 7}

    expected = run(STOCK, requests, model_dir)
    result = run(
        requests=requests,
        model_dir=model_dir,
        async_scheduling=True,
        speculative_config=drafts,
        swap_faults={"preempted_share": 0.15},
        **swap(),
    )

    assert result.num_preemptions >= 20
    assert result.stats["swap"]["num_loaded"] > 1000
    assert_exact(result, expected)


def test_without_swapping_the_same_run_recomputes(model_dir, reference):
    """Control: the figure above is not zero by itself."""
    result = run(
        requests=make_workload(30), model_dir=model_dir, num_blocks=SCARCE, **swap(mode="off")
    )

    assert result.num_preemptions >= 15
    assert result.num_recomputed > 1000
    assert num_different(result, reference) == 0


@pytest.mark.parametrize(
    "faults",
    [{"zeroed": True}, {"without_pins": True, "max_delay_polls": 4}],
    ids=["zeroed", "without_pins"],
)
def test_tokens_depend_on_what_comes_back(faults, model_dir, reference):
    """Negative controls: the comparison finds wrong KV, and pins are needed."""
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        num_blocks=SCARCE,
        swap_faults=faults,
        **swap(),
    )

    assert num_different(result, reference) > 200


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_late_and_failing_copies_and_aborts_spare_the_others(is_async, model_dir, reference):
    result = run(
        requests=make_workload(30, num_aborts=8),
        model_dir=model_dir,
        async_scheduling=is_async,
        prefix_caching=is_async,
        num_blocks=SCARCE,
        swap_faults={"max_delay_polls": 4, "fail_ratio": 0.2, "seed": 1},
        **swap(),
    )

    assert result.stats["swap"]["num_failed_jobs"] > 0
    assert_exact(result, reference)


@pytest.mark.parametrize("caching", [pytest.param(False, marks=LONG), True])
def test_windows_beside_full_attention(caching, windowed_dir, windowed_reference):
    result = run(
        requests=make_workload(30),
        model_dir=windowed_dir,
        prefix_caching=caching,
        swap_faults={"max_delay_polls": 2},
        num_blocks=30,
        **swap(),
    )

    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert num_different(result, windowed_reference) == 0
    assert_nothing_left_behind(result)


def test_windowed_model_depends_on_what_comes_back(windowed_dir, windowed_reference):
    """Negative control for the hybrid model."""
    result = run(
        requests=make_workload(30),
        model_dir=windowed_dir,
        swap_faults={"zeroed": True},
        num_blocks=30,
        **swap(),
    )

    assert num_different(result, windowed_reference) > 200


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"host_gib": 0}, None),
        pytest.param({}, {"num_host_slots": 1}, marks=pytest.mark.slow),
        ({}, {"num_host_slots": 6}),
    ],
    ids=["no host memory", "one slot", "six slots"],
)
def test_without_room_on_the_host_requests_are_computed_again(
    options, faults, model_dir, reference
):
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        num_blocks=SCARCE,
        swap_faults=faults,
        **swap(**options),
    )

    assert result.stats["swap"]["num_refused"] > 0
    assert num_different(result, reference) == 0
    assert_nothing_left_behind(result)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_without_a_slot_are_loaded_ahead(is_async, model_dir, reference):
    """Preempted at random with few slots and some room: KV is back before the slot is free."""
    result = run(
        requests=make_workload(30),
        model_dir=model_dir,
        async_scheduling=is_async,
        max_num_seqs=6,
        swap_faults={"preempted_share": 0.03, "max_delay_polls": 2},
        num_blocks=60,
        **swap(),
    )

    assert result.stats["swap"]["num_loaded_ahead"] > 1000
    assert result.num_recomputed == 0
    assert num_different(result, reference) == 0
    assert_nothing_left_behind(result)


def continued(result: RunResult) -> list[EngineRequest]:
    """The next turn of each conversation: prompt and answer, and something new."""
    return [
        EngineRequest(f"next {r.req_id}", (*r.prompt, *result.tokens[r.req_id], 7, 8, 9), 20)
        for r in make_workload()
    ]


def quantized_with_follow_ups(model_dir: Path, **faults: Any) -> RunResult:
    """Requests that are preempted at random; their blocks stay in an ample prefix cache."""
    result = run(
        requests=make_workload(),
        model_dir=model_dir,
        prefix_caching=True,
        follow_up=continued,
        swap_faults={"preempted_share": 0.02, **faults},
        num_blocks=300,
        **swap(mode="int8"),
    )
    assert result.stats["swap"]["num_swapped_in"] > 500
    assert_nothing_left_behind(result)
    return result


def test_follow_ups_of_quantized_requests_are_exact(model_dir):
    """What was restored from INT8, or computed from it, is not in the prefix cache."""
    result = quantized_with_follow_ups(model_dir)

    assert num_different(result, run(STOCK, continued(result), model_dir)) == 0


def test_follow_ups_see_quantized_blocks_that_are_published(model_dir):
    """Negative control: without the guard the test above fails."""
    result = quantized_with_follow_ups(model_dir, publishes_inexact=True)

    assert num_different(result, run(STOCK, continued(result), model_dir)) > 0
