"""Fates of requests that never were, for what is told of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sola_sched.core.fates import ENDS, FATE, Ended
from sola_sched.reports.fates import fate_of

_USUAL: dict[str, Any] = {
    "arrival_s": 10.0,
    "started_s": 10.0,
    "first_token_s": 10.5,
    "last_token_s": 11.5,
    "ended_s": 11.5,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "e2e_s": math.inf,
    "lost_s": math.nan,
    "need_s": math.nan,
    "alone_s": 0.05,
    "alone_step_s": 0.01,
    "num_prompt": 200,
    "num_output": 101,
    "predicted": -1,
    "num_chunks": 1,
    "end": "attained",
}


def record_of(**fields: Any) -> np.void:
    """A request that met its targets, but for what `fields` say."""
    record = np.zeros(1, FATE)[0]
    for name, value in (_USUAL | fields).items():
        record[name] = ENDS.index(value) if name == "end" else value
    return record


def a_fate(req_id: str = "r", slo_class: str = "default", **fields: Any) -> dict[str, Any]:
    """The same as a server tells it."""
    return fate_of(req_id, slo_class, record_of(**fields))


def ended(*records: np.void, first: int = 0) -> Ended:
    """Requests that have ended, named r0, r1, ... from `first` on."""
    names = [f"r{first + place}" for place in range(len(records))]
    return Ended(names, ["default"] * len(names), np.fromiter(records, FATE, len(records)))
