"""Swapping while everything goes wrong at once: no wrong token, nothing left behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, make_workload, run
from needs import NEEDS_SWAPPING
from swapping import assert_exact, swap

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING, pytest.mark.slow]


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


#: The rest in `make test-slow` only.
NUM_SHORT = 4


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_SHORT),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_SHORT, 100)),
    ],
)
def test_no_fault_shows_in_a_token_or_stays_behind(seed, model_dir):
    arguments = disturbed(seed)
    spared = [replace(r, abort_step=None) for r in arguments["requests"]]

    assert_exact(run(model_dir=model_dir, **arguments), run(STOCK, spared, model_dir))
