"""How far apart are two answers of one model to one prompt?  A floor for every predictor.

    python benchmarks/predictor/bench_floor.py

Vicuna-7B answered 17,996 of Alpaca's prompts at temperatures 0, 0.3, 0.5 and 0.7. Its answer at
temperature 0 is taken as the prediction of the others: no predictor from the prompt knows more.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from sola_sched.length_predictor.corpus import data_folder
from sola_sched.length_predictor.scoring import score
from sola_sched.prediction.length import NUM_LEVELS

_TEMPERATURES = (0.0, 0.3, 0.5, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR")
    args = parser.parse_args()
    folder = data_folder(args.data)
    if folder is None:
        raise SystemExit("error: the data folder must hold alpaca.jsonl.gz; pass --data DIR.")
    with gzip.open(folder / "alpaca.jsonl.gz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    lengths = np.array([row["vicuna7b_tokens"] for row in rows if "vicuna7b_tokens" in row], float)
    known = np.repeat(lengths[:, :1], NUM_LEVELS, axis=1)
    print("| temperature | accuracy | error | median rel. | MAE | τ |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for column, temperature in enumerate(_TEMPERATURES[1:], 1):
        figures = score(known, lengths[:, column])
        print(
            f"| {temperature} | {figures.accuracy:.3f} | {figures.relative_error:.3f} | "
            f"{figures.median_relative_error:.3f} | {figures.mean_absolute_error:.1f} | "
            f"{figures.kendall_tau:.3f} |"
        )


if __name__ == "__main__":
    main()
