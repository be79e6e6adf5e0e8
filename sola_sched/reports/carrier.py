"""How reports get from vLLM's engine core to the process that answers `/metrics`.

They ride on the statistics that vLLM itself sends there, since only those reach every front end,
across data parallel ranks, nodes and API servers. `SchedulerStats` has no free field: unknown
fields are dropped in decoding, and what is put into `kv_connector_stats` without a connector makes
vLLM's own loggers raise. Its dictionaries of LoRA adapters are empty when they leave the engine
core - the front end fills them - and an entry more harms nobody. Our logger takes it out before
vLLM's look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELD = "waiting_lora_adapters"
_MARK = "sola_sched:"


def find_carrier(outputs: Mapping[int, Any]) -> dict[str, int] | None:
    """The place for a report in an engine core's `EngineCoreOutputs`; None where none travels."""
    for group in outputs.values():
        stats = getattr(group, "scheduler_stats", None)
        if stats is not None:
            carrier: dict[str, int] | None = getattr(stats, _FIELD, None)
            return carrier
    return None


def is_possible(stats_cls: type[Any]) -> bool:
    """Whether vLLM's `SchedulerStats` can carry reports."""
    return _FIELD in getattr(stats_cls, "__dataclass_fields__", {})


def put(carrier: dict[str, int], text: str) -> None:
    """Add a report."""
    carrier[_MARK + text] = 0


def take(stats: Any) -> list[str]:
    """Remove and return the reports that came with a front end's `SchedulerStats`."""
    carrier: dict[str, int] | None = getattr(stats, _FIELD, None)
    if not carrier:
        return []
    marked = [key for key in carrier if key.startswith(_MARK)]
    for key in marked:
        del carrier[key]
    return [key.removeprefix(_MARK) for key in marked]
