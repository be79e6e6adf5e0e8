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
from sola_sched.vllm_adapter.versions import Rooms

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
    """Prefills A and B run, and C waits; plans choose B and C.

    Args:
        num_free_blocks: As the plan sees them.
        ranks: Priorities of A, B and C.
        images: Who of them has an image, of 20 tokens; the encoder cache has room for 10.
    """

    def __init__(
        self, num_free_blocks: int = 100, ranks: tuple[int, int, int] = (0, 0, 0), images: str = "b"
    ) -> None:
        build = StateBuilder(num_free_blocks=num_free_blocks)
        self.a, self.b = (build.prefill(name, waited_s=0.1, computed=500) for name in "ab")
        self.c = build.waiting("c", waited_s=0.1)
        self.state = build.build()
        self.state.table.priority[[self.a, self.b, self.c]] = ranks
        self.rooms = Rooms(num_embeddings=10, num_blocks=50, num_slots=2)
        self.blocks_of_c = 40
        seams: Any = SimpleNamespace(
            rooms=lambda: self.rooms,
            next_image_length=lambda request: 20 * len(request.mm_features),
            num_blocks_of=lambda request: self.blocks_of_c,
        )
        self.requests = {
            name: SimpleNamespace(request_id=name, mm_features=[None] * (name in images))
            for name in "abc"
        }
        self.put_off = PutOff(seams, self.requests)
        self.plan = StepPlan(run=np.array([self.b]), admit=np.array([self.c]), token_budget=64)

    def step(self, *, num_left: int = 64, scheduled: str = "") -> str:
        """Who of the running ones took part, in order."""
        plan = self.put_off.with_held(self.state, self.plan)
        assert plan.run is not None
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(scheduled, 1), preempted_req_ids=set()
        )
        self.put_off.scheduled(
            self.state.table,
            self.plan,
            output,
            num_left=num_left,
            offered=[self.requests["c"]],
        )
        return "".join(str(self.state.table.req_id[row]) for row in plan.run)


def test_the_held_one_takes_part_behind_until_it_is_tried_again() -> None:
    case = Case()
    assert case.step() == "b"
    for _ in range(RETRY_PLANS - 1):
        assert case.step(num_left=0) == "ba"
    assert case.step(num_left=0) == "b"


def test_room_in_the_encoder_cache_is_a_reason_to_try_again_at_once() -> None:
    case = Case()
    case.step()
    case.rooms = Rooms(5, 99, 9)
    assert case.step(num_left=0) == "ba"
    case.rooms = Rooms(11, 50, 2)
    assert case.step(num_left=0) == "b"


def test_who_got_tokens_or_found_none_left_is_not_put_off() -> None:
    case = Case()
    case.step(num_left=0)
    case.step(scheduled="bc")
    assert case.step() == "b"


def test_nobody_takes_part_for_whom_memory_may_be_short() -> None:
    case = Case(num_free_blocks=4)
    case.step()
    assert case.step() == "b"


def test_who_has_no_image_is_not_put_off_whatever_it_lacks() -> None:
    case = Case(images="a")
    case.step()
    assert case.step() == "b"


@pytest.mark.parametrize("rooms", [Rooms(10, 39, 2), Rooms(10, 50, 0)], ids=["memory", "slots"])
def test_one_that_waits_for_memory_or_a_slot_is_not_put_off(rooms: Rooms) -> None:
    case = Case(images="c")
    case.rooms = rooms
    case.step()
    assert case.step() == "b"


@pytest.mark.parametrize("rooms", [Rooms(10, 51, 2), Rooms(10, 50, 3)], ids=["memory", "slots"])
def test_one_that_waits_is_tried_again_when_memory_or_slots_come_free(rooms: Rooms) -> None:
    case = Case(images="c")
    case.step(scheduled="b")
    assert case.step(num_left=0) == "ba"
    case.rooms = rooms
    assert case.step(num_left=0) == "b"


@pytest.mark.parametrize(
    ("images", "ranks", "taking_part"),
    [
        ("b", (1, 0, 1), "b"),
        ("b", (1, 1, 0), "b"),
        ("c", (1, 1, 0), "b"),
        ("c", (1, 0, 1), "ba"),  # B is first, and has what it needs
        ("b", (0, 1, 0), "ba"),
        ("c", (0, 0, 1), "ba"),
    ],
)
def test_nobody_of_a_lower_class_takes_the_tokens_of_one_put_off_or_of_those_that_wait(
    images: str, ranks: tuple[int, int, int], taking_part: str
) -> None:
    """vLLM serves all that run before those that wait."""
    case = Case(ranks=ranks, images=images)
    case.step()
    assert case.step() == taking_part


@pytest.mark.parametrize("images", ["ab", "ac"])
def test_one_of_a_lower_class_takes_part_whose_image_may_have_the_room_that_is_short(
    images: str,
) -> None:
    case = Case(ranks=(1, 0, 0), images=images)
    case.step()
    assert case.step() == "ba"
