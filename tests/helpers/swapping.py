"""Engines that swap, and what must hold of their runs; import vLLM first."""

from __future__ import annotations

from typing import Any

from engine_harness import RunResult

_NO_SLO = {"ttft_s": None, "tpot_s": None, "log_interval_s": 0}


def swap(scheduler_cls: str = "sola_sched.Scheduler", **options: Any) -> dict[str, Any]:
    """Keyword arguments of `run` for an engine that swaps, without targets: stock order."""
    sola = {**_NO_SLO, "swap": {"always": True, "mode": "raw", **options}}
    return {"scheduler_cls": scheduler_cls, "additional_config": {"sola_sched": sola}}


def assert_nothing_left_behind(result: RunResult) -> None:
    """No block, pin or host slot is still taken."""
    assert (result.num_leaked_blocks, result.swap_problems) == (0, [])


def assert_exact(result: RunResult, reference: RunResult) -> None:
    """The same tokens, those before an abort included, and nothing left behind."""
    for name, expected in reference.tokens.items():
        tokens = result.tokens[name]
        is_aborted = result.finish_reasons[name] == "abort"
        assert tokens == (expected[: len(tokens)] if is_aborted else expected), name
    assert_nothing_left_behind(result)
