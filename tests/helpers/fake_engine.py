"""A deployment with a fake server in it, for tests of what Ray Serve does around one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from fake_replica import FakeReplica

from sola_sched.reports.load_text import to_json

STEPS = [0.0, 0.0, 1e-4, 0.01, 1e-4, 1e-8, 0.01, 0.01]


def load(waiting: int = 0, running: int = 0, **changes: Any) -> dict[str, Any]:
    """The load of an engine with so many requests of a hundred tokens."""
    return {
        "kv_capacity_tokens": 10_000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "num_gpus": 1,
        "kv_used_tokens": 100 * running,
        "num_waiting_lost": 0,
        "serves_lost_last": True,
        "step_coefficients": STEPS,
        "waiting_tokens": np.full(waiting, 100.0),
        "waiting_outputs": np.full(waiting, 50.0),
        "running_ctx": np.full(running, 100.0),
        "running_prefill": np.zeros(running),
        "running_outputs": np.full(running, 10.0),
        "running_left": np.full(running, 40.0),
        "running_bank_s": np.full(running, math.inf),
        "running_lost": np.zeros(running),
    } | changes


def line(age_s: float = 0.0, **changes: Any) -> bytes:
    """A line of a feed."""
    return f"{age_s:g} {to_json(load(**changes))}".encode()


class FakeEngine:
    """Serves a `FakeReplica`; the first of two reports that much waits there.

    Args:
        token_s: Time of each token.
    """

    def __init__(self, token_s: float) -> None:
        from ray import serve

        context = serve.get_replica_context()
        self._is_busy = context.rank.rank == 0
        self._fake = FakeReplica(token_s=token_s, load=[line(waiting=4000 if self._is_busy else 0)])
        self._running = self._fake.running()

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Asked once by Serve."""
        await self._running.__aenter__()
        return {"url": self._fake.url}

    async def is_busy(self, _: dict[str, Any]) -> bool:
        """Which of the two has been called."""
        return self._is_busy
