"""What the table of a scheduler must say of the requests that vLLM runs."""

from __future__ import annotations

from typing import Any

from sola_sched.core.state import DECODE, PREFILL


def assert_table_agrees(scheduler: Any) -> None:
    """After `schedule()`: who decodes and who does not, and how much of a prompt is computed."""
    table = scheduler.sola_monitor.table
    for request in scheduler.running:
        row, name = table.row_of[request.request_id], request.request_id
        left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if table.phase[row] == PREFILL:
            assert table.num_computed[row] == request.num_computed_tokens, name
        else:
            assert table.phase[row] == DECODE, name
            assert left <= 1, f"{name} has {left} tokens to compute and is taken for a decode"


def check_table_at_each_step(scheduler: Any) -> None:
    """Have `assert_table_agrees` hold after each `schedule()` from here on."""
    schedule = scheduler.schedule

    def checked(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        assert_table_agrees(scheduler)
        return output

    scheduler.schedule = checked
