"""Who is loaded from the host before it has a slot: vLLM gives it the next one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from live_sessions import assert_each_has_one_place
from needs import NEEDS_SWAPPING
from states import StateBuilder
from virtual_runs import make_small_engine, step_until
from vllm.v1.request import RequestStatus

import sola_sched
from sola_sched.core.state import StepPlan
from sola_sched.core.table import PARKED
from sola_sched.simulator import VirtualRequest
from sola_sched.vllm_adapter.swap.swapping_ahead import SwappingAhead
from sola_sched.vllm_adapter.versions import Seams

pytestmark = pytest.mark.vllm


class Ahead:
    """A full engine in which "low" and "high" wait with copies, and "new" without one.

    Args:
        priorities: Of the three.
    """

    def __init__(self, **priorities: int) -> None:
        self.builder = StateBuilder(max_num_running=1)
        self.builder.decode("runs", first_ago_s=0.1, out=3)
        self.rows = {
            name: self.builder.waiting(name, waited_s=0.1, priority=priority)
            for name, priority in priorities.items()
        }
        self.requests = {
            name: SimpleNamespace(
                request_id=name, num_tokens=100, status=RequestStatus.WAITING_FOR_REMOTE_KVS
            )
            for name in priorities
        }
        self.loaded: list[str] = []
        self.taken_back: list[str] = []
        self.scheduler = SimpleNamespace(
            running=["runs"], requests=self.requests, block_size=16,
            finished_recving_kv_req_ids=set(),
        )  # fmt: skip
        with_copies = [name for name in priorities if name != "new"]
        swapping: Any = SimpleNamespace(
            copies=SimpleNamespace(num_copies=len(with_copies), req_ids=lambda: with_copies),
            take_back=lambda request: self.taken_back.append(request.request_id),
        )
        seams: Any = SimpleNamespace()
        scheduler: Any = self.scheduler
        self.ahead = SwappingAhead(scheduler, seams, swapping)
        self.ahead._start_load = self._start_load  # type: ignore[method-assign]

    def _start_load(self, request: Any) -> bool:
        self.loaded.append(request.request_id)
        return True

    def step(self) -> None:
        self.ahead.order(self.builder.build(), StepPlan())


def test_nobody_is_loaded_past_one_of_a_higher_priority() -> None:
    ahead = Ahead(low=1, high=0, new=0)
    ahead.step()
    assert ahead.loaded == ["high"]

    ahead = Ahead(low=1, new=0)
    ahead.step()
    assert ahead.loaded == [], "the next slot is the new one's"


def test_without_priorities_all_are_loaded() -> None:
    ahead = Ahead(low=0, high=0, new=0)
    ahead.step()
    assert sorted(ahead.loaded) == ["high", "low"]


@pytest.mark.parametrize(("priority", "taken"), [(0, ["low"]), (1, []), (2, [])])
def test_who_is_loaded_gives_its_memory_back_when_a_higher_one_comes(
    priority: int, taken: list[str]
) -> None:
    ahead = Ahead(low=1, new=priority)
    ahead.builder.table.move(ahead.rows["low"], PARKED)
    ahead.ahead.residents.add("low")
    ahead.step()
    assert ahead.taken_back == [], "its load is under way"
    ahead.scheduler.finished_recving_kv_req_ids.add("low")
    ahead.step()
    assert ahead.taken_back == taken


@NEEDS_SWAPPING
@pytest.mark.parametrize("is_async", [False, True])
def test_once_steering_is_off_nobody_is_loaded_before_it_has_a_slot(
    is_async: bool, tmp_path: Path
) -> None:
    """Those that were wait without KV again, in the queue: vLLM would start them first."""
    from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

    path = tmp_path / "options.json"
    swap = {"mode": "raw", "host_gib": 0.3, "always": True}
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 0.5, "tpot_s": 0.03, "swap": swap, "options_file": str(path),
         "plan_limit_s": None},
        async_scheduling=is_async, num_blocks=160, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=400, stall_limit_s=60.0, swap_link=LinkSpeed(100_000, 2e9),
    )  # fmt: skip
    rng = random.Random(0)
    for number in range(60):
        prompt_len, output_len = rng.randrange(50, 190), rng.randrange(20, 200)
        engine.add(VirtualRequest(f"r{number}", 0.1 * number, output_len, prompt_len=prompt_len))
    scheduler = engine.scheduler
    residents = scheduler._swapping._ahead.residents
    step_until(engine, lambda: len(residents) > 1)
    assert len(residents) > 1
    path.write_text(json.dumps({"steer": False}))
    scheduler._changing.look()
    before = scheduler.sola_stats()["swap"]
    step_until(engine, lambda: not residents, 20)
    assert not residents
    assert_each_has_one_place(scheduler)
    engine.run()

    after = scheduler.sola_stats()["swap"]
    assert [after[name] for name in ("num_loaded_ahead", "num_saved_ahead")] == [
        before[name] for name in ("num_loaded_ahead", "num_saved_ahead")
    ]
    assert all(record.is_finished for record in engine.records)
    assert engine.num_free_blocks == 159
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize(
    ("status", "num_computed", "is_loaded", "resumes"),
    [
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 50, False, False),
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 50, True, True),
        (RequestStatus.WAITING, 50, False, True),
        (RequestStatus.PREEMPTED, 0, False, True),  # its load has failed, and memory is short
    ],
)
def test_who_starts_before_all_that_a_plan_admits_is_planned_for(
    status: RequestStatus, num_computed: int, is_loaded: bool, resumes: bool
) -> None:
    request = SimpleNamespace(request_id="r", status=status, num_computed_tokens=num_computed)
    seams = Seams.__new__(Seams)
    seams._has_skipped = False
    scheduler: Any = SimpleNamespace(
        kv_holding_waiting=[request],
        finished_recving_kv_req_ids={"r"} if is_loaded else set(),
        _is_blocked_waiting_status=lambda s: s == RequestStatus.WAITING_FOR_REMOTE_KVS,
    )
    seams._scheduler = scheduler

    assert seams.resuming() == ([request] if resumes else [])
