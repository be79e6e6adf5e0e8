"""Tables of evaluation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
    ("trained on", "trained_on", "{}"),
    ("tested on", "tested_on", "{}"),
    ("predictor", "predictor", "{}"),
    ("learned live", "num_learned", "{:,}"),
    ("n", "num_prompts", "{:,}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("error", "relative_error", "{:.3f}"),
    ("mean rel.", "mean_relative_error", "{:.2f}"),
    ("median rel.", "median_relative_error", "{:.3f}"),
    ("MAE", "mean_absolute_error", "{:.1f}"),
    ("τ", "kendall_tau", "{:.3f}"),
    ("coverage", "coverage", "{:.2f}"),
    ("pinball", "pinball", "{:.2f}"),
    ("p50 ms", "latency_p50_ms", "{:.2f}"),
    ("p99 ms", "latency_p99_ms", "{:.2f}"),
    ("MB", "num_bytes", "{:.1f}"),
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the rows of ``evaluation.evaluate``."""
    lines = [
        "| " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "| " + " | ".join("---" if i < 3 else "---:" for i in range(len(_COLUMNS))) + " |",
    ]
    for row in rows:
        cells = []
        for _, key, form in _COLUMNS:
            value = row.get(key)
            if key == "num_bytes" and value is not None:
                value = value / 1e6
            missing = value is None or (isinstance(value, float) and math.isnan(value))
            cells.append("–" if missing else form.format(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
