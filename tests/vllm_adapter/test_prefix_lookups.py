"""What a waiting request would find in the prefix cache is looked up as far as there is time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("vllm")

from loaded_engine import changed
from virtual_model import TINY_MODEL
from virtual_runs import make_small_engine, step_until
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.requests.prefix_lookups import BLOCKS_PER_STEP

pytestmark = pytest.mark.vllm

_SHARED = [1 + i % 250 for i in range(40_000)]  # 2,500 blocks
_NUM_STEPS = 200


class Watched:
    """An engine with all slots taken, where others wait whose prompts have a cached prefix.

    Args:
        num_shared: Tokens of a prefix; 0 for none.
        num_prefixes: Different ones, in turn.
        num_waiting: Requests that come at once.
        sola: Options.
        scheduler_cls: Of the engine.

    Attributes:
        found: Blocks found by each look-up of the planner's.
        found_at_first: The same in the step in which they have come.
    """

    def __init__(
        self,
        num_shared: int,
        *,
        num_prefixes: int = 1,
        num_waiting: int = 8,
        sola: dict[str, Any] | None = None,
        scheduler_cls: type[Any] = sola_sched.Scheduler,
    ) -> None:
        self.num_waiting = num_waiting
        self.engine: VirtualEngine = make_small_engine(
            scheduler_cls,
            {"ttft_s": 5.0, "tpot_s": 0.05} | (sola or {}),
            model={**TINY_MODEL, "max_position_embeddings": 65_536},
            enable_prefix_caching=True,
            num_blocks=6000,
            max_model_len=65_536,
            max_num_batched_tokens=8192,
            max_num_seqs=4,
        )
        engine = self.engine
        prefixes = [[1 + i, *_SHARED[: num_shared - 1]] for i in range(num_prefixes)]
        if not num_shared:
            prefixes = []
        for i, shared in enumerate(prefixes):
            engine.add(VirtualRequest(f"first{i}", 0.0, output_len=40, prompt_token_ids=shared))
        step_until(engine, lambda: False)
        now_s = engine.clock.now
        for i in range(4):
            engine.add(VirtualRequest(f"d{i}", now_s, output_len=800, prompt_len=50))
        for _ in range(20):
            engine.step()
        self.found: list[int] = []
        find = engine.scheduler._seams.num_cached_tokens

        def watched(request: Request) -> int:
            num_tokens = find(request)
            self.found.append(num_tokens // 16)
            return num_tokens

        engine.scheduler._seams.num_cached_tokens = watched
        for i in range(num_waiting):
            prompt = [*prefixes[i % num_prefixes], *[1 + i] * 200]
            engine.add(
                VirtualRequest(f"w{i}", engine.clock.now, output_len=5, prompt_token_ids=prompt)
            )
        engine.step()
        self.found_at_first, self.found = self.found, []

    def expected(self) -> list[int]:
        table = self.engine.scheduler.sola_monitor.table
        return [int(table.num_computed[table.row_of[f"w{i}"]]) for i in range(self.num_waiting)]


def test_long_prefixes_are_looked_up_seldom_and_known_all_the_time() -> None:
    watched = Watched(len(_SHARED))

    for _ in range(_NUM_STEPS):
        watched.engine.step()
        assert watched.expected() == [len(_SHARED)] * 8

    assert max(watched.found) == len(_SHARED) // 16
    assert sum(watched.found) <= (_NUM_STEPS + 1) * BLOCKS_PER_STEP + max(watched.found)
    assert len(watched.found) >= 8  # each of them again


def test_short_prefixes_are_looked_up_at_each_step() -> None:
    watched = Watched(480)

    for _ in range(20):
        watched.engine.step()

    assert len(watched.found) == 4 * 20


def test_of_many_that_come_at_once_a_few_are_looked_up_and_the_answer_holds_for_all() -> None:
    watched = Watched(len(_SHARED), num_waiting=60)

    assert sum(watched.found_at_first) <= 2 * BLOCKS_PER_STEP + len(_SHARED) // 16
    assert watched.expected() == [len(_SHARED)] * 60


def test_nobody_is_refused_before_the_look_up() -> None:
    """Their prompts are cached but for the end; computing them takes four times their target."""
    watched = Watched(
        20_000, num_prefixes=4, num_waiting=4, sola={"ttft_s": 0.5, "overload": "reject"}
    )
    assert watched.expected() == [20_000, 0, 0, 0]

    for _ in range(5000 // BLOCKS_PER_STEP):
        watched.engine.step()

    assert watched.expected() == [20_000] * 4
    assert watched.engine.scheduler.sola_stats()["num_rejected"] == 0


@pytest.mark.parametrize("is_planned", [True, False])
def test_nothing_is_kept_of_those_that_have_ended(is_planned: bool) -> None:
    """Also where no step is planned, as with pipeline parallelism."""
    watched = Watched(20_000, num_prefixes=4, num_waiting=0)
    engine = watched.engine
    lookups: Any = engine.scheduler._booking._lookups
    if not is_planned:
        engine.scheduler.sola_planner = None
        engine.scheduler._planning._has_no_policy = True
    for number in range(12):
        prompt = [1 + number % 4, *_SHARED[:19_999], *[1 + number] * 200]
        now_s = engine.clock.now
        engine.add(VirtualRequest(f"r{number}", now_s, output_len=2, prompt_token_ids=prompt))
    engine.step()
    kept = len(lookups._unknown)
    step_until(engine, lambda: False)

    assert kept > 0, "not all can be looked up at once"
    assert not lookups._unknown


def test_one_that_has_just_come_is_not_looked_up_twice() -> None:
    """Between its arrival and the next step nothing enters or leaves the cache."""
    watched = Watched(160, num_waiting=1)
    watched.engine.step()

    assert len(watched.found_at_first) == 1
    assert len(watched.found) == 1, "while it waits it is looked up at each step"


def with_windows(arguments: dict[str, Any]) -> None:
    """Half of the layers attend to the last 1,024 tokens."""
    layers = arguments["kv_cache_config"] = copy.copy(arguments["kv_cache_config"])
    (group,) = layers.kv_cache_groups
    full = group.kv_cache_spec
    window = SlidingWindowSpec(
        block_size=full.block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        sliding_window=1024,
    )
    layers.kv_cache_groups = [KVCacheGroupSpec(group.layer_names, window)]


def test_look_ups_that_walk_over_all_blocks_and_find_none_are_seldom_too() -> None:
    """A window of a prompt is looked for from its end, block by block."""
    watched = Watched(0, scheduler_cls=changed(sola_sched.Scheduler, with_windows), num_waiting=0)
    for i in range(8):
        prompt = [1 + i, *_SHARED[1:]]
        now_s = watched.engine.clock.now
        watched.engine.add(VirtualRequest(f"w{i}", now_s, output_len=5, prompt_token_ids=prompt))
    watched.found.clear()

    for _ in range(_NUM_STEPS):
        watched.engine.step()

    assert set(watched.found) == {0}
    num_blocks = len(_SHARED) // 16
    assert len(watched.found) * num_blocks <= (_NUM_STEPS + 2) * BLOCKS_PER_STEP + num_blocks
    assert len(watched.found) >= 8
    assert watched.engine.scheduler.sola_stats()["failures"] == {}


def test_steps_for_which_nothing_is_planned_count_too() -> None:
    engine = make_small_engine(
        sola_sched.Scheduler, {"ttft_s": 5.0, "tpot_s": 0.05}, enable_prefix_caching=True
    )
    engine.add(VirtualRequest("one", arrival_s=0.0, prompt_len=40, output_len=200))
    for _ in range(20):
        engine.step()
    lookups = engine.scheduler._planning._lookups
    lookups._debt = 10 * BLOCKS_PER_STEP

    for _ in range(10):
        engine.step()

    assert lookups._debt == 0
