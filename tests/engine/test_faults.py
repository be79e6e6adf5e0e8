"""Whatever fails in this package, the real engine answers every request with its own tokens.

Failures are injected at the calls between the scheduler and its parts, before or after the call
itself, at random steps and at every step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, TIGHT_BLOCKS, RunResult, make_workload, num_different, run
from faults import COPY_SITES, SITES, SWAP_SITES, TURN_SITES, Faults
from marks import LONG, MODES
from needs import NEEDS_SWAPPING
from turn_takers import PATIENCE_S, takers

pytestmark = [pytest.mark.vllm, pytest.mark.injects_failures]

#: Targets that the workload misses in part, so that every kind of decision is made.
SOLA = {"ttft_s": 0.2, "tpot_s": 0.012, "log_interval_s": 0.1, "swap": {"mode": "off"}}


@cache
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(), model_dir)


def serve_with(
    faults: Faults, model_dir: Path, *, sola: dict[str, Any] | None = None, **options: Any
) -> RunResult:
    with faults.injected():
        return run(
            "sola_sched.Scheduler",
            make_workload(),
            model_dir,
            num_blocks=TIGHT_BLOCKS,
            additional_config={"sola_sched": {**SOLA, **(sola or {})}},
            follow_up=faults.stop,
            **options,
        )


def assert_nothing_is_lost(result: RunResult, model_dir: Path) -> None:
    expected = reference(model_dir)
    assert result.finish_reasons == expected.finish_reasons
    assert num_different(result, expected) == 0
    assert result.num_leaked_blocks == 0
    assert result.swap_problems == []


@pytest.mark.parametrize(
    ("policy", "caching", "async_scheduling"),
    [
        ("attain", True, True),
        pytest.param("attain", False, False, marks=pytest.mark.slow),
        pytest.param("alise", True, True, marks=pytest.mark.slow),
        pytest.param("attain", True, False, marks=LONG),
        pytest.param("attain", False, True, marks=LONG),
        pytest.param("alise", False, False, marks=LONG),
    ],
)
def test_failures_everywhere_change_no_token(
    policy: str, caching: bool, async_scheduling: bool, model_dir: Path
) -> None:
    faults = Faults(*SITES, share=0.004, seed=len(policy) + caching, first=30)
    result = serve_with(
        faults,
        model_dir,
        sola={"policy": policy},
        async_scheduling=async_scheduling,
        prefix_caching=caching,
    )
    assert faults.total > 3
    assert_nothing_is_lost(result, model_dir)


@pytest.mark.parametrize(
    ("site", "async_scheduling"),
    [
        ("attain", True),
        *(
            pytest.param(site, True, marks=pytest.mark.slow)
            for site in ("monitor completed", "monitor state", "monitor scheduled", "steps end")
        ),
        pytest.param("attain", False, marks=pytest.mark.slow),
        *(
            pytest.param(site, False, marks=LONG)
            for site in ("monitor completed", "monitor state", "monitor scheduled", "steps end")
        ),
    ],
)
def test_a_part_that_always_fails_leaves_the_engine_to_vllm(
    site: str, async_scheduling: bool, model_dir: Path
) -> None:
    faults = Faults(site, share=1.0)
    result = serve_with(faults, model_dir, async_scheduling=async_scheduling)
    assert result.stats["is_aside"]
    assert faults.num_raised[site] > 1
    assert_nothing_is_lost(result, model_dir)


@NEEDS_SWAPPING
@pytest.mark.parametrize("async_scheduling", MODES)
@pytest.mark.parametrize("share", [0.01, 0.2], ids=["it goes on", "it steps aside"])
def test_with_swapping_no_copy_is_left_behind(
    share: float, async_scheduling: bool, model_dir: Path
) -> None:
    faults = Faults(*SITES, *SWAP_SITES, share=share / 5, seed=1, first=30)
    for site in ("save", "learn from a copy"):  # some 20 calls each
        faults.share_of[site], faults.first_of[site] = share * 5, 0
    result = serve_with(
        faults,
        model_dir,
        sola={"swap": {"mode": "raw", "host_gib": 0.05}},
        async_scheduling=async_scheduling,
    )
    assert faults.total > 3
    assert_nothing_is_lost(result, model_dir)
    assert result.stats["swap"]["num_swapped_out"]


#: Sites that fail in one run, three or four of them.
GROUPS = [sorted(COPY_SITES)[start::6] for start in range(6)]
#: Share of the calls that fail where a few are made in a run.
COPY_SHARE_OF = {
    "copies dropped": 0.5,
    "copies free blocks": 0.2,
    "copies sent": 0.02,
    "copies reported": 0.1,
    "copies idle": 0.02,
    "copy covers": 0.02,
}


def resets(core: Any) -> None:
    """Clear the prefix cache, which drops all copies and takes back what is being loaded."""
    core.reset_prefix_cache(reset_running_requests=True)


@NEEDS_SWAPPING
@pytest.mark.parametrize("async_scheduling", MODES)
def test_failures_in_the_books_of_copies_change_no_token(
    async_scheduling: bool, model_dir: Path
) -> None:
    """A few sites in a run: the first failures would hide those of all others."""
    for seed, sites in enumerate(GROUPS):
        faults = Faults(*sites, share=0.1, seed=seed)
        faults.share_of |= {s: COPY_SHARE_OF[s] for s in sites if s in COPY_SHARE_OF}
        result = serve_with(
            faults,
            model_dir,
            sola={"swap": {"mode": "raw", "host_gib": 0.05, "always": True}},
            async_scheduling=async_scheduling,
            swap_faults={"max_delay_polls": 3, "seed": seed, "preempted_share": 0.03},
            at_steps=dict.fromkeys((60, 90, 91, 150), resets),
        )
        assert faults.total > 1, faults.num_raised
        assert_nothing_is_lost(result, model_dir)


@NEEDS_SWAPPING
def test_a_worker_that_cannot_copy_leaves_the_engine_without_copies(model_dir: Path) -> None:
    faults = Faults("worker started", share=1.0)
    swap = {"swap": {"mode": "raw", "host_gib": 0.05, "always": True}}
    result = serve_with(faults, model_dir, sola=swap)
    assert faults.total == 1
    assert result.num_preemptions
    assert result.stats["swap"]["num_host_slots"] == result.stats["swap"]["num_swapped_out"] == 0
    assert_nothing_is_lost(result, model_dir)


def test_a_lease_that_fails_changes_no_token_and_keeps_no_neighbour_waiting(
    model_dir: Path, tmp_path: Path
) -> None:
    turns = {"group": str(tmp_path / "turns"), "share": 0.2, "limit_s": PATIENCE_S}
    faults = Faults(*TURN_SITES, share=0.05, first=10)
    with takers(str(tmp_path / "turns"), "neighbour") as (neighbour,):
        neighbour.order("work")
        result = serve_with(faults, model_dir, sola={"turns": turns}, async_scheduling=True)
        neighbour.order("give", None)
        assert neighbour.answer() > 10
    assert faults.total == 1
    assert result.stats["failures"]
    assert_nothing_is_lost(result, model_dir)
