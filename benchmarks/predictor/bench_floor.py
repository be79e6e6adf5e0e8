"""How far apart are two answers of one model to one prompt?  A floor for every predictor.

Vicuna-7B answered 17,996 of Alpaca's prompts at temperatures 0, 0.3, 0.5 and 0.7. Its answer at
temperature 0 is taken as the prediction of the others: no predictor from the prompt knows more.
"""

from __future__ import annotations

import gzip
import json

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.errors import ConfigError
from sola_sched.length_predictor.evaluation.scoring import score
from sola_sched.prediction.length import NUM_LEVELS

_TEMPERATURES = (0.0, 0.3, 0.5, 0.7)


def floor(setup: Setup) -> Outcome:
    """Errors of the answer at temperature 0 as a prediction of the others."""
    path = setup.data / "alpaca.jsonl.gz" if setup.data else None
    if path is None or not path.is_file():
        raise ConfigError("'--data' must hold alpaca.jsonl.gz (got no such file).")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    lengths = np.array([row["vicuna7b_tokens"] for row in rows if "vicuna7b_tokens" in row], float)
    known = np.repeat(lengths[:, :1], NUM_LEVELS, axis=1)
    lines = []
    for column, temperature in enumerate(_TEMPERATURES[1:], 1):
        figures = score(known, lengths[:, column])
        lines.append([
            str(temperature), f"{figures.accuracy:.3f}", f"{figures.relative_error:.3f}",
            f"{figures.median_relative_error:.3f}", f"{figures.mean_absolute_error:.1f}",
            f"{figures.kendall_tau:.3f}",
        ])  # fmt: skip
    head = ["temperature", "accuracy", "error", "median rel.", "MAE", "τ"]
    return Outcome([], markdown(head, lines, 0))
