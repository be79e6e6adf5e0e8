"""Random planner states: any mixture of requests, targets, classes, slots and memory."""

from __future__ import annotations

import math

import numpy as np
from states import StateBuilder

from sola_sched.config.slo import SloTarget

#: None, loose and tight ones, and one without TPOT.
TARGETS = [SloTarget(), SloTarget(10.0, 0.1), SloTarget(0.5, 0.02), SloTarget(1.0, math.inf)]


def random_builder(rng: np.random.Generator, num_classes: int) -> StateBuilder:
    """Requests of `num_classes` priority classes, running and waiting."""
    blocks = int(rng.integers(20, 4000))
    b = StateBuilder(
        left=float(rng.uniform(1, 300)),
        max_num_tokens=int(rng.choice([64, 512, 2048])),
        max_num_running=int(rng.integers(1, 40)),
        num_blocks=blocks,
        num_free_blocks=int(rng.integers(0, blocks + 1)),
        elapsed_s=float(rng.uniform(0, 0.3)),
    )
    for i in range(int(rng.integers(0, b.options["max_num_running"] + 1))):
        slo, priority = TARGETS[rng.integers(4)], int(rng.integers(0, num_classes))
        if rng.random() < 0.7:
            first = float(rng.uniform(0, 5))
            b.decode(
                f"d{i}",
                first_ago_s=first,
                out=int(rng.integers(1, 400)),
                arrived_ago_s=first + float(rng.uniform(0, 3)),
                slo=slo,
                priority=priority,
            )
        else:
            waited_s = float(rng.uniform(0, 3))
            b.prefill(f"p{i}", waited_s=waited_s, computed=64, slo=slo, priority=priority)
    for i in range(int(rng.integers(0, 60))):
        b.waiting(
            f"w{i}",
            waited_s=float(rng.uniform(0, 3)),
            prompt=int(rng.integers(1, 3000)),
            slo=TARGETS[rng.integers(4)],
            priority=int(rng.integers(0, num_classes)),
        )
    return b
