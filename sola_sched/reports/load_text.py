"""An engine's load as text: one line of JSON.

Arrays are base64 of little-endian 32-bit floats, since a report with many requests must cost the
engine microseconds, and since banks may be infinite. A gateway needs this and not the engine's own
state, so that it starts without compiled code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sola_sched.cost.file import Coefficients
from sola_sched.cost.plain import PlainStepTimes
from sola_sched.errors import ReportError

_NUMBERS = ("kv_capacity_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
            "num_gpus", "kv_used_tokens", "num_waiting_lost",
            "serves_lost_last")  # fmt: skip
_ARRAYS = ("waiting_tokens", "waiting_outputs", "running_ctx", "running_prefill",
           "running_outputs", "running_left", "running_bank_s", "running_lost")  # fmt: skip
STEPS = "step_coefficients"
#: A coefficient of a step's time beyond this is nonsense.
_LONGEST_S = 1e6


def to_json(load: Mapping[str, Any]) -> str:
    """One line."""
    plain = {name: load[name] for name in (*_NUMBERS, STEPS)}
    packed = {
        name: base64.b64encode(np.asarray(load[name], dtype="<f4").tobytes()).decode()
        for name in _ARRAYS
    }
    return json.dumps(plain | packed, separators=(",", ":"), allow_nan=False)


def from_json(text: str | bytes) -> dict[str, Any]:
    """What `to_json` wrote; arrays as float64, and under `model` a `PlainStepTimes` or None.

    Raises:
        ReportError: It is nothing of that kind. Whether the values can be true is not looked at.
    """
    try:
        value = json.loads(text)
        load = {name: value[name] for name in _NUMBERS}
        for name in _ARRAYS:
            load[name] = np.frombuffer(base64.b64decode(value[name], validate=True), "<f4").astype(
                np.float64
            )
        steps = value[STEPS]
        load["model"] = None
        if steps is not None:
            seconds = [float(each) for each in steps]
            if not max(map(abs, seconds)) < _LONGEST_S:
                raise ValueError(f"'{STEPS}' must be seconds below {_LONGEST_S:g}")
            load["model"] = PlainStepTimes(Coefficients(*seconds))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ReportError(
            f"a load must be what `to_json` writes (got {text[:80]!r}: {error!r:.200})."
        ) from None
    return load
