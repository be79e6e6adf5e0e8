"""Swaps in virtual time: the real scheduler and connector, a link that takes time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip(
    "sola_sched.kv_swap.connector",
    reason="KV swapping takes vLLM 0.32 or later",
    exc_type=ImportError,
)

from needs import NEEDS_SWAPPING
from virtual_model import TINY_MODEL
from virtual_runs import make_small_engine, step_until

from sola_sched.core.state import StepPlan, StepState
from sola_sched.errors import ConfigError
from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.jobs import Job, Piece
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.simulator.swap_link import LinkSpeed, SwapLink
from sola_sched.vllm_adapter.scheduler import Scheduler
from sola_sched.vllm_adapter.swap.swapping import Swapping

pytestmark = pytest.mark.vllm

FAST = LinkSpeed(kv_bytes_per_token=1000, bytes_per_s=1e9)


def make_link(speed: LinkSpeed, *, is_int8: bool = False, host_gib: float = 1e-3) -> SwapLink:
    geometry = Geometry.of([16], is_int8=is_int8, group_tokens=16, segment_tokens=64)
    connector = SimpleNamespace(
        manager=SimpleNamespace(geometry=geometry), options=SimpleNamespace(host_gib=host_gib)
    )
    return SwapLink(connector, speed)  # type: ignore[arg-type]


def make_job(job_id: int, num_tokens: int, *, is_load: bool) -> Job:
    return Job(job_id, f"r{job_id}", is_load, (Piece(0, 0, num_tokens, (), 0, num_tokens, ()),))


def test_each_direction_carries_one_copy_after_the_other() -> None:
    """32 kB at 32 kB/s are a second; loads do not wait for saves."""
    link = make_link(LinkSpeed(1000, 32_000))
    link.submit([make_job(1, 32, is_load=False), make_job(2, 32, is_load=False)], at_s=10.0)
    link.submit([make_job(3, 32, is_load=True)], at_s=10.0)

    ended = [
        sorted(out.kv_connector_worker_meta.report.num_ended) if out else []
        for out in map(link.poll, (10.9, 11.01, 11.9, 12.01))
    ]

    assert ended == [[], [1, 3], [], [2]]


def test_int8_moves_and_takes_fewer_bytes() -> None:
    raw, int8 = make_link(FAST), make_link(FAST, is_int8=True)

    slots = [link.poll(0.0).kv_connector_worker_meta.report.num_slots for link in (raw, int8)]

    assert slots[1] / slots[0] == pytest.approx(2 / (1 + 4 / 16), rel=0.02)


def serve(
    swap_link: LinkSpeed | None,
    *,
    is_async: bool,
    always: bool = True,
    num_requests: int = 40,
) -> VirtualEngine:
    engine = VirtualEngine(
        Scheduler,
        model=TINY_MODEL,
        num_blocks=34,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=100,
        async_scheduling=is_async,
        step_time=StepTimeModel(base_s=0.02, per_decode_s=0.001, per_prefill_token_s=0.001),
        additional_config={
            "sola_sched": {"ttft_s": None, "tpot_s": None, "swap": {"always": always}}
        },
        swap_link=swap_link,
    )
    engine.run(
        [
            VirtualRequest(f"r{i}", arrival_s=0.05 * i, output_len=60, prompt_len=40 + 7 * (i % 9))
            for i in range(num_requests)
        ]
    )
    return engine


@NEEDS_SWAPPING
@pytest.mark.parametrize("is_async", [False, True])
def test_swapping_saves_the_time_of_computing_again(is_async: bool) -> None:
    without, fast = serve(None, is_async=is_async), serve(FAST, is_async=is_async)
    slow = serve(LinkSpeed(1000, 1e5), is_async=is_async)
    counts = fast.scheduler.sola_stats()["swap"]

    assert sum(record.num_preemptions for record in without.records) > 10
    assert counts["num_swapped_in"] == counts["num_loaded"] > 500
    assert fast.clock.now < without.clock.now
    assert fast.clock.now < slow.clock.now
    for engine in (fast, slow):
        engine.scheduler.sola_copies.check_integrity()
        assert engine.scheduler.sola_copies.is_idle
        assert engine.num_free_blocks == 33


@NEEDS_SWAPPING
@pytest.mark.parametrize("is_async", [False, True])
def test_whoever_waits_has_a_token_left_to_compute(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a step that has no tokens but for its decodes would never admit it."""
    least, with_swaps = [], Swapping.with_swaps

    def watched(self: Swapping, state: StepState, plan: StepPlan) -> StepPlan:
        table, waiting = state.table, state.waiting
        least.extend(table.prefill_target[waiting] - table.num_computed[waiting])
        return with_swaps(self, state, plan)

    monkeypatch.setattr(Swapping, "with_swaps", watched)
    serve(FAST, is_async=is_async)

    assert min(least) == 1


@NEEDS_SWAPPING
def test_where_copies_take_longer_they_are_not_made() -> None:
    # Each copy lasts hundreds of steps here, so a few requests have to do.
    engine = serve(LinkSpeed(1000, 2e4), is_async=False, always=False, num_requests=12)
    counts = engine.scheduler.sola_stats()

    assert counts["swap"]["num_not_worth"] > counts["swap"]["num_swapped_out"]


def test_a_profile_without_a_link_is_refused(tmp_path) -> None:
    from sola_sched.bench.backends.base import parse_scheduler
    from sola_sched.bench.backends.simulation import _swap_link

    profile = SimpleNamespace(name="mine", kv_bytes_per_token=None, pcie_bytes_per_s=None)

    assert _swap_link(profile, parse_scheduler("sola")) is None
    with pytest.raises(ConfigError, match=r"'swap.mode' must be off with profile mine"):
        _swap_link(profile, parse_scheduler("sola:swap.mode=raw"))


def test_copies_of_requests_that_have_ended_end_too() -> None:
    engine = make_small_engine(
        Scheduler,
        {"ttft_s": 0.1, "tpot_s": 0.05},
        num_blocks=60,
        max_model_len=256,
        max_num_seqs=16,
        swap_link=LinkSpeed(100_000, 1e7),
    )
    for number in range(30):
        engine.add(
            VirtualRequest(
                f"r{number}", arrival_s=0.05 * number, prompt_len=100, output_len=60, abort_s=2.0
            )
        )

    step_until(engine, lambda: False)

    assert not engine.has_work
    assert engine.num_free_blocks == 59
