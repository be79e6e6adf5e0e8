"""Requests without any target beside some that have one: they run on what the others leave over."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, warm_up

import sola_sched
from sola_sched.simulator import StepTimeModel, VirtualRequest

pytestmark = pytest.mark.vllm

_STEPS = StepTimeModel(base_s=0.01, per_decode_s=5e-4, per_prefill_token_s=1e-4)


@pytest.mark.parametrize("num_batch", [40, 100])
def test_decodes_without_a_target_are_held_before_one_with_a_target_is_given_up(
    num_batch: int,
) -> None:
    """Together their steps take longer than TPOT (stock: 36 and 71 ms): nobody in time."""
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 1.0, "tpot_s": 0.03, "classes": {"batch": {}}},
        max_num_seqs=128,
        num_blocks=20_000,
        step_time=_STEPS,
    )
    warm_up(engine)
    for number in range(num_batch):
        engine.add(
            VirtualRequest(
                f"batch{number}", arrival_s=4.0 + 0.02 * number, prompt_len=100, output_len=800,
                extra_args={"slo_class": "batch"},
            )
        )  # fmt: skip
    for number in range(80):
        engine.add(
            VirtualRequest(
                f"chat{number}", arrival_s=8.0 + 0.25 * number, prompt_len=100, output_len=60
            )
        )

    records = engine.run()

    chats = [record for record in records if record.req_id.startswith("chat")]
    in_time = [
        record.first_token_s - record.arrival_s <= 1.0
        and (record.last_token_s - record.first_token_s) / 59 <= 0.03
        for record in chats
    ]
    assert sum(in_time) >= 0.95 * len(chats)
    # The others get the rest of the time: they end soon after the last chat.
    assert max(record.last_token_s for record in records) < 70.0
    assert all(record.num_output_tokens in (6, 60, 800) for record in records)
