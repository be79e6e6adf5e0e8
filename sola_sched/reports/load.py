"""What an engine is doing, for a router: its requests, its memory, its step times.

The names are those of `sola_sched.cluster.view.InstanceView`, which is made of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import (
    DECODE,
    PARKED,
    PREFILL,
    WAITING,
    IntArray,
    RequestTable,
    StepState,
)
from sola_sched.cost.model import CostModel
from sola_sched.reports.load_text import STEPS
from sola_sched.reports.telemetry import is_lost

FloatArray = NDArray[np.float64]

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)


def load_of(
    monitor: StateMonitor,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_gpus: int,
    num_free_blocks: int,
    num_blocks: int,
    block_size: int,
    serves_lost_last: bool,
) -> dict[str, Any]:
    """The load of an engine: numbers, arrays, and the coefficients of its step times.

    Args:
        monitor: Of its requests.
        max_num_seqs, max_num_batched_tokens, max_model_len, num_gpus: As in `InstanceView`.
        num_free_blocks, num_blocks, block_size: KV cache; sizes in blocks and tokens.
        serves_lost_last: As in `InstanceView`.
    """
    table, now_s = monitor.table, monitor.clock()
    state = StepState(
        now_s=now_s,
        table=table,
        running=_NO_ROWS,
        waiting=_NO_ROWS,
        lengths=monitor.lengths,
        cost=monitor.cost,
        max_num_tokens=max_num_batched_tokens,
        max_num_running=max_num_seqs,
        num_free_blocks=num_free_blocks,
        num_blocks=num_blocks,
        block_size=block_size,
        trusts_predictions=monitor.trust.is_trusted,
    )
    phase = table.phase
    (waiting,) = ((phase == WAITING) | (phase == PARKED)).nonzero()
    waiting = waiting[np.argsort(table.arrival_s[waiting], kind="stable")]
    (running,) = ((phase == PREFILL) | (phase == DECODE)).nonzero()
    outputs = table.num_output[running]
    prefill = np.maximum(table.prefill_target[running] - table.num_computed[running], 0)
    is_decode = phase[running] == DECODE
    # A router waits for what is under way as for what is to come.
    under_way = monitor.chunks_in_flight()[running]
    held = np.where(is_decode, table.num_prompt[running] + outputs, table.num_computed[running])
    return {
        "kv_capacity_tokens": num_blocks * block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "num_gpus": num_gpus,
        "kv_used_tokens": (num_blocks - num_free_blocks) * block_size,
        "num_waiting_lost": int(is_lost(table, waiting, now_s).sum()),
        "serves_lost_last": serves_lost_last,
        STEPS: _folded(monitor.cost),
        "waiting_tokens": table.num_prompt[waiting] + table.num_output[waiting],
        "waiting_outputs": state.remaining(waiting),
        "running_ctx": np.maximum(held - under_way, 0),
        "running_prefill": np.where(is_decode, 0, prefill) + under_way,
        "running_outputs": outputs,
        "running_left": state.remaining(running),
        "running_bank_s": _bank_s(table, running, now_s),
        "running_lost": is_lost(table, running, now_s),
    }


def _bank_s(table: RequestTable, rows: IntArray, now_s: float) -> FloatArray:
    """TPOT target x outputs less the time since the first token; inf where there is neither."""
    first_s = table.first_token_s[rows]
    with np.errstate(invalid="ignore"):  # no target and no output: 0 x inf
        bank_s = table.tpot_s[rows] * table.num_output[rows] - (now_s - first_s)
    return np.where(np.isnan(bank_s), math.inf, bank_s)


def _folded(cost: CostModel) -> list[float] | None:
    """Coefficients with the present correction in them; None before there are any."""
    if not cost.is_ready:
        return None
    found, gamma = cost.coefficients, cost.gamma
    prefill, decode = gamma.prefill, gamma.decode
    d0, c1 = found.d0 * prefill, found.c1 * decode
    return [
        found.a0 * prefill, found.b0 * prefill, found.c0 * prefill, d0,
        found.a1 * decode, found.b1 * decode, c1, min(found.overlap, d0, c1),
    ]  # fmt: skip
