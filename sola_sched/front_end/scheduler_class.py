"""Whether an engine is ours, told by its `--scheduler-cls`."""

from __future__ import annotations

from typing import Any


def is_ours(scheduler_cls: Any) -> bool:
    """Whether a `--scheduler-cls` value, name or class, is steered by this package."""
    if scheduler_cls is None:
        return False
    if isinstance(scheduler_cls, str):
        if scheduler_cls.split(".", 1)[0] == "sola_sched":
            return True
        from vllm.utils.import_utils import resolve_obj_by_qualname

        scheduler_cls = resolve_obj_by_qualname(scheduler_cls)
    return any(
        base.__module__ == "sola_sched.vllm_adapter.scheduler" for base in scheduler_cls.__mro__
    )
