"""Prefills that a plan chooses and vLLM puts off, around a real vLLM scheduler in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from loaded_engine import changed
from states import StateBuilder
from virtual_runs import make_small_engine
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

import sola_sched
from sola_sched.core.state import StepPlan
from sola_sched.simulator import StepTrace, VirtualRequest
from sola_sched.vllm_adapter.steps.put_off import RETRY_PLANS, PutOff

pytestmark = pytest.mark.vllm

#: Embeddings of an image; the encoder cache has room for one.
IMAGE = 256


def with_small_encoder_cache(built: Any) -> None:
    built.max_num_encoder_input_tokens = IMAGE + 44
    built.encoder_cache_manager = EncoderCacheManager(cache_size=IMAGE + 44)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("offset", [0, 10], ids=["waits", "runs"])
def test_nobody_is_held_for_a_prompt_whose_image_finds_no_room_but_that_of_the_held_one(
    offset: int, is_async: bool
) -> None:
    """A may take its time, so plans would hold it until B has started; B needs the room of A."""
    engine = make_small_engine(
        changed(sola_sched.Scheduler, lambda arguments: None, with_small_encoder_cache),
        {"ttft_s": 6.0, "tpot_s": 0.02},
        num_blocks=4000,
        max_model_len=4096,
        async_scheduling=is_async,
    )
    for i in range(40):
        engine.add(VirtualRequest(f"warm{i}", 0.02 * i, 6, prompt_len=20 + 7 * i))
    for i in range(40):
        engine.add(VirtualRequest(f"d{i}", 3.0 + 0.01 * i, 400, prompt_len=50 + i, max_tokens=500))
    patient = {"ttft_slo_ms": 60_000.0}
    engine.add(VirtualRequest("A", 6.0, 5, prompt_len=1500, extra_args=patient))
    engine.add(VirtualRequest("B", 6.3, 5, prompt_len=900))
    for name, start in (("A", 770), ("B", offset)):
        place = PlaceholderRange(offset=start, length=IMAGE)
        image = MultiModalFeatureSpec(None, "image", f"image of {name}", place)
        engine._requests[name].mm_features = [image]
    times_s = []

    def note(trace: StepTrace) -> None:
        if "B" in engine._records and {"A", "B"} & trace.output.num_scheduled_tokens.keys():
            times_s.append(trace.start_s)

    engine.run(on_step=note)

    ended_s = max(engine.record(name).first_token_s or 0.0 for name in "AB")
    gaps = np.diff([at_s for at_s in times_s if 6.3 <= at_s <= ended_s])
    assert max(gaps) < 0.5
    assert all(record.is_finished for record in engine.records)
    assert engine.scheduler.sola_stats()["failures"] == {}


class Case:
    """Prefills A and B run, and C waits; plans choose B and C."""

    def __init__(self, num_free_blocks: int = 100) -> None:
        build = StateBuilder(num_free_blocks=num_free_blocks)
        self.a, self.b = (build.prefill(name, waited_s=0.1, computed=500) for name in "ab")
        self.c = build.waiting("c", waited_s=0.1)
        self.state = build.build()
        self.room = 10
        seams: Any = SimpleNamespace(encoder_room=lambda: self.room)
        self.put_off = PutOff(seams)
        self.plan = StepPlan(run=np.array([self.b]), admit=np.array([self.c]), token_budget=64)

    def step(self, *, num_left: int = 64, scheduled: tuple[int, ...] = ()) -> list[int]:
        """Who of the running ones took part, in order."""
        plan = self.put_off.with_held(self.state, self.plan)
        assert plan.run is not None
        name_of = self.state.table.req_id
        output = SimpleNamespace(
            num_scheduled_tokens={name_of[row]: 1 for row in scheduled}, preempted_req_ids=set()
        )
        offered = [SimpleNamespace(request_id=name_of[self.c])]
        self.put_off.scheduled(
            self.state.table, self.plan, output, num_left=num_left, offered=offered
        )
        return [int(row) for row in plan.run]


def test_the_held_one_takes_part_behind_until_it_is_tried_again() -> None:
    case = Case()
    assert case.step() == [case.b]
    for _ in range(RETRY_PLANS - 1):
        assert case.step(num_left=0) == [case.b, case.a]
    assert case.step(num_left=0) == [case.b]


def test_room_in_the_encoder_cache_is_a_reason_to_try_again_at_once() -> None:
    case = Case()
    case.step()
    case.room = 5
    assert case.step(num_left=0) == [case.b, case.a]
    case.room = 11
    assert case.step(num_left=0) == [case.b]


def test_who_got_tokens_or_found_none_left_is_not_put_off() -> None:
    case = Case()
    case.step(num_left=0)
    case.step(scheduled=(case.b, case.c))
    assert case.step() == [case.b]


def test_nobody_takes_part_for_whom_memory_may_be_short() -> None:
    case = Case(num_free_blocks=4)
    case.step()
    assert case.step() == [case.b]
