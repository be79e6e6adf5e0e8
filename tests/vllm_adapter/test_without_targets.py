"""Requests without any target beside some that have one: they run on what the others leave over."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, warm_up

import sola_sched
from sola_sched.simulator import RequestRecord, StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

_TTFT_S, _TPOT_S = 1.0, 0.03
_SOLA = {"ttft_s": _TTFT_S, "tpot_s": _TPOT_S, "classes": {"batch": {}}}

_STEPS = StepTimeModel(base_s=0.01, per_decode_s=5e-4, per_prefill_token_s=1e-4)


def _add_batch(engine: VirtualEngine, count: int) -> None:
    """Long answers without a target, one each 20 ms from 4 s on."""
    for number in range(count):
        engine.add(
            VirtualRequest(
                f"batch{number}", arrival_s=4.0 + 0.02 * number, prompt_len=100, output_len=800,
                extra_args={"slo_class": "batch"},
            )
        )  # fmt: skip


def _add_chat(engine: VirtualEngine, count: int = 80) -> None:
    """Short answers with both targets, four a second from 8 s on."""
    for number in range(count):
        engine.add(
            VirtualRequest(
                f"chat{number}", arrival_s=8.0 + 0.25 * number, prompt_len=100, output_len=60
            )
        )


def _chat_in_time(records: list[RequestRecord]) -> float:
    """Share of the short answers."""
    chat = [record for record in records if record.req_id.startswith("chat")]
    in_time = [
        record.first_token_s - record.arrival_s <= _TTFT_S
        and (record.last_token_s - record.first_token_s) / 59 <= _TPOT_S
        for record in chat
    ]
    return sum(in_time) / len(chat)


@pytest.mark.parametrize("num_batch", [40, 100])
def test_decodes_without_a_target_are_held_before_one_with_a_target_is_given_up(
    num_batch: int,
) -> None:
    """Together their steps take longer than TPOT (stock: 36 and 71 ms): nobody in time."""
    engine = make_small_engine(
        sola_sched.Scheduler, _SOLA, max_num_seqs=128, num_blocks=20_000, step_time=_STEPS
    )
    warm_up(engine)
    _add_batch(engine, num_batch)
    _add_chat(engine)

    records = engine.run()

    assert _chat_in_time(records) >= 0.95
    # The others get the rest of the time: they end soon after the last chat.
    assert max(record.last_token_s for record in records) < 70.0
    assert all(record.num_output_tokens in (6, 60, 800) for record in records)


@pytest.mark.parametrize(
    ("num_batch", "max_num_seqs", "num_blocks"),
    [(200, 128, 20_000), (60, 32, 20_000), (100, 128, 3000)],
    ids=["slots", "few-slots", "memory"],
)
def test_decodes_without_a_target_give_way_where_slots_or_memory_are_short(
    num_batch: int, max_num_seqs: int, num_blocks: int
) -> None:
    """They hold all of it when the others come; first come first served has nobody in time."""
    engine = make_small_engine(
        sola_sched.Scheduler, _SOLA, max_num_seqs=max_num_seqs, num_blocks=num_blocks
    )
    warm_up(engine)
    _add_batch(engine, num_batch)
    _add_chat(engine)

    records = engine.run()

    assert _chat_in_time(records) >= 0.95
    assert all(record.num_output_tokens in (6, 60, 800) for record in records)
