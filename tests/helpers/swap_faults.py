"""Disturbs KV swapping in an engine of this process: late, failing and forged copies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from sola_sched.core.state import StepPlan, StepState


def install(
    core: Any,
    *,
    max_delay_polls: int = 0,
    fail_ratio: float = 0.0,
    fail_loads_only: bool = False,
    num_host_slots: int | None = None,
    without_pins: bool = False,
    zeroed: bool = False,
    publishes_inexact: bool = False,
    preempted_share: float = 0.0,
    seed: int = 0,
) -> None:
    """Disturb the copies of `core`.

    Args:
        max_delay_polls: Copies start up to so many steps late.
        fail_ratio: Share of copies that fail.
        fail_loads_only: Only copies from the host fail.
        num_host_slots: Size of the host pool that the scheduler is told.
        without_pins: Blocks are reused while they are copied: a negative control.
        zeroed: What comes back from the host is zero: a negative control.
        preempted_share: Share of the running requests that are preempted in each step, whatever
            the memory; none whose name begins with "next".
        publishes_inexact: Blocks restored from INT8 enter the prefix cache: a negative control.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # The scheduler is told of ends in the worker's order of polls, so one generator serves all.
    rng = random.Random(seed)
    worker = get_kv_transfer_group().worker
    transfers = worker.transfers
    if max_delay_polls:
        transfers.delay_polls = lambda job: rng.randrange(max_delay_polls + 1)
    if fail_ratio:

        def fail(job: Any) -> None:
            if random.Random(seed * 1_000_003 + job.job_id).random() >= fail_ratio:
                return
            if job.is_load or not fail_loads_only:
                raise OSError("a copy was made to fail")

        transfers.before_copy = fail
    if num_host_slots is not None:
        worker.pool.num_slots = num_host_slots
    if without_pins:
        manager = core.scheduler.sola_copies
        manager._pin = manager._unpin = lambda blocks: None
    if publishes_inexact:
        core.scheduler.sola_swap.is_int8 = False
    if preempted_share:
        core.scheduler.sola_planner = _Preempting(rng, preempted_share)
    if zeroed:
        for packer in worker._packers:
            packer.unpack = _zeroing(packer.unpack)


class _Preempting:
    """A planner that leaves everything to vLLM but preempts at random."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share = rng, share

    def plan(self, state: StepState) -> StepPlan:
        names = state.table.req_id
        rows = [row for row in state.running.tolist() if not str(names[row]).startswith("next")]
        chosen = [row for row in rows if self._rng.random() < self._share]
        return StepPlan(preempt=np.array(chosen, dtype=np.int64))


def _zeroing(unpack: Any) -> Any:
    return lambda piece, image, tables=None: unpack(piece, image.zero_(), tables)


def leftovers(core: Any) -> list[str]:
    """What swapping left behind in an engine that has served all its requests."""
    if getattr(core.scheduler, "sola_swap", None) is None:
        return []
    manager = core.scheduler.sola_copies
    manager.check_integrity()
    problems = []
    if not manager.is_idle or core.scheduler.sola_swap.has_pending_push_work():
        problems.append("copies are under way")
    if manager.num_free_slots != manager.num_slots:
        problems.append(f"{manager.num_slots - manager.num_free_slots} host slots are in use")
    if inexact := core.scheduler._swapping.inexact:
        problems.append(f"requests are still marked as inexact: {inexact}")
    return problems
