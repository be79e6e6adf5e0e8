"""What the length predictors say about held-out prompts.

The runs in virtual time have no text. For Alpaca they replay these predictions prompt by prompt;
for ShareGPT, whose public lengths come without text, they draw from the errors made on the prompts
of Chatbot Arena.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.length_predictor.building import build_lexical, build_retrieval, encode_all
from sola_sched.length_predictor.corpus import Corpus, load
from sola_sched.length_predictor.retrieval.embed import SentenceEncoder
from sola_sched.prediction.length import LengthPrediction

NUM_TRAIN, NUM_TEST = 12_000, 2_000
NUM_FOLDS = 5


def predictions(setup: Setup) -> Outcome:
    """Files of predictions in the folder of the rows, and how good they are."""
    if not setup.is_stored:
        _record(setup.path, setup.data)
    rows = []
    for path in sorted(setup.path.glob("predictions-*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        rows.append(row | {"num": len(row["lengths"])})
    lines = [
        [f"{row['dataset']}, {row['num']:,}", row["predictor"], f"{row['median_log_error']:.2f}",
         f"{row['rank_correlation']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return Outcome(rows, markdown(["data", "predictor", "error", "rank correlation"], lines, 2))


def _record(folder: Path, data: Path | None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    encoder = SentenceEncoder()
    folder.mkdir(parents=True, exist_ok=True)

    train, test = load("alpaca", data).split()
    rng = np.random.default_rng(0)
    train = train.take(np.sort(rng.permutation(len(train))[:NUM_TRAIN]))
    test = test.take(np.sort(rng.permutation(len(test))[:NUM_TEST]))
    predictors: dict[str, Any] = {
        "lexical": build_lexical(train),
        "retrieval": build_retrieval(train, encoder),
    }
    for name, predictor in predictors.items():
        counts = _prompt_tokens(test, data)
        _write(
            folder, "alpaca", name, [(test, predictor.predict(test.prompts))], prompt_tokens=counts
        )

    arena = load("arena", data)
    vectors = encode_all(encoder, arena)
    fold_of = rng.integers(0, NUM_FOLDS, len(arena))
    parts: dict[str, list[tuple[Corpus, list[LengthPrediction]]]] = {"lexical": [], "retrieval": []}
    for fold in range(NUM_FOLDS):
        rest, held = arena.take(fold_of != fold), arena.take(fold_of == fold)
        near = build_retrieval(rest, encoder, vectors=vectors[fold_of != fold])
        parts["lexical"].append((held, build_lexical(rest).predict(held.prompts)))
        parts["retrieval"].append((held, near.predict(held.prompts)))
    for name, folds in parts.items():
        _write(folder, "arena", name, folds)


def _prompt_tokens(corpus: Corpus, data: Path | None) -> list[int]:
    assert data is not None
    with gzip.open(data / "alpaca.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        counts = {row["prompt"]: int(row["prompt_tokens"]) for row in rows}
    return [counts[prompt] for prompt in corpus.prompts]


def _write(
    folder: Path,
    dataset: str,
    name: str,
    parts: list[tuple[Corpus, list[LengthPrediction]]],
    **more: list[int],
) -> None:
    """One file per data set and predictor, as `sim.predictor=recorded:FILE` reads it."""
    lengths = np.concatenate([corpus.lengths for corpus, _ in parts])
    predictions = [prediction for _, found in parts for prediction in found]
    quantiles = np.array([prediction.quantiles for prediction in predictions])
    error = np.abs(np.log(np.median(quantiles, axis=1) / lengths))
    covered = (quantiles >= lengths[:, None]).mean(axis=0)
    sources = [prediction.source for prediction in predictions]
    row: Row = {
        "predictor": name,
        "dataset": dataset,
        "source": max(set(sources), key=sources.count),
        "median_log_error": round(float(np.median(error)), 4),
        "rank_correlation": round(float(spearmanr(quantiles.mean(axis=1), lengths).statistic), 4),
        "coverage": np.round(covered, 3).tolist(),
        **more,
        "lengths": lengths.tolist(),
        "quantiles": np.round(quantiles).astype(int).tolist(),
    }
    path = folder / f"predictions-{dataset}-{name}.json"
    path.write_text(json.dumps(row, separators=(",", ":")) + "\n", encoding="utf-8")
    print({k: v for k, v in row.items() if not isinstance(v, list) or len(v) == 10}, len(lengths))
