"""What a waiting request would find in the prefix cache is looked up as far as there is time."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from virtual_runs import make_small_engine, step_until
from vllm.v1.request import Request

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.scheduler import _BLOCKS_PER_STEP

pytestmark = pytest.mark.vllm

_SHARED = [1 + i % 250 for i in range(40_000)]  # 2,500 blocks
_NUM_STEPS = 200


class Watched:
    """An engine with all slots taken, where others wait whose prompts share a cached prefix.

    Attributes:
        found: Blocks found by each look-up of the planner's.
    """

    def __init__(self, num_shared: int) -> None:
        self.engine: VirtualEngine = make_small_engine(
            sola_sched.Scheduler,
            {"ttft_s": 5.0, "tpot_s": 0.05},
            model={**TINY_MODEL, "max_position_embeddings": 65_536},
            enable_prefix_caching=True,
            num_blocks=6000,
            max_model_len=65_536,
            max_num_batched_tokens=8192,
            max_num_seqs=4,
        )
        engine, shared = self.engine, _SHARED[:num_shared]
        engine.add(VirtualRequest("first", 0.0, output_len=40, prompt_token_ids=shared))
        step_until(engine, lambda: False)
        now_s = engine.clock.now
        for i in range(4):
            engine.add(VirtualRequest(f"d{i}", now_s, output_len=800, prompt_len=50))
        for _ in range(20):
            engine.step()
        for i in range(8):
            prompt = [*shared, *[1 + i] * 200]
            engine.add(
                VirtualRequest(f"w{i}", engine.clock.now, output_len=5, prompt_token_ids=prompt)
            )
        engine.step()
        self.found: list[int] = []
        find = engine.scheduler._seams.num_cached_tokens

        def watched(request: Request) -> int:
            num_tokens = find(request)
            self.found.append(num_tokens // 16)
            return num_tokens

        engine.scheduler._seams.num_cached_tokens = watched

    def expected(self) -> list[int]:
        table = self.engine.scheduler.sola_monitor.table
        return [int(table.num_computed[table.row_of[f"w{i}"]]) for i in range(8)]


def test_long_prefixes_are_looked_up_seldom_and_known_all_the_time() -> None:
    watched = Watched(len(_SHARED))

    for _ in range(_NUM_STEPS):
        watched.engine.step()
        assert watched.expected() == [len(_SHARED)] * 8

    assert max(watched.found) == len(_SHARED) // 16
    assert sum(watched.found) <= (_NUM_STEPS + 1) * _BLOCKS_PER_STEP + max(watched.found)
    assert len(watched.found) >= 8  # each of them again


def test_short_prefixes_are_looked_up_at_each_step() -> None:
    watched = Watched(480)

    for _ in range(20):
        watched.engine.step()

    assert len(watched.found) == 4 * 20
