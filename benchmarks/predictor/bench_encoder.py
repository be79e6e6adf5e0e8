"""Speed of sentence encoders and quality of the predictions from their vectors, in turn.

    OMP_NUM_THREADS=1 python benchmarks/predictor/bench_encoder.py [--old FILE]

`fp32` is sentence-transformers' torch backend as it is, `int8` the same with the network of
`length_predictor/retrieval/int8.py`. `--old` adds the encoder of an earlier commit, whose source
is had by `git show COMMIT:length_predictor/retrieval/embed.py > FILE`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.length_predictor.building import build_retrieval
from sola_sched.length_predictor.corpus import Corpus, load
from sola_sched.length_predictor.evaluation.evaluation import Served, evaluate
from sola_sched.length_predictor.retrieval.embed import PRECISIONS, SentenceEncoder
from sola_sched.length_predictor.retrieval.index import use_one_thread
from sola_sched.length_predictor.retrieval.predictor import Encoder, Vectors

_BATCH = 16
_NUM_TIMED = 160


class Remembering:
    """An encoder that encodes each text once; quality does not depend on how often it is asked."""

    def __init__(self, encoder: Encoder) -> None:
        self.dim, self.identity = encoder.dim, encoder.identity
        self._encoder = encoder
        self._known: dict[str, Any] = {}

    def encode(self, texts: Sequence[str]) -> Vectors:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._encoder.encode(new), strict=True))
        return np.stack([self._known[text] for text in texts])


def speed(encoders: Mapping[str, Encoder], corpus: Corpus) -> list[dict[str, Any]]:
    """CPU milliseconds of single prompts and of prompts in batches, the encoders in turn."""
    single: dict[str, list[float]] = {name: [] for name in encoders}
    batch: dict[str, list[float]] = {name: [] for name in encoders}
    for encoder in encoders.values():
        for text in corpus.prompts[:10]:
            encoder.encode([text])
    for start in range(0, len(corpus), _BATCH):
        texts = corpus.prompts[start : start + _BATCH]
        for name, encoder in encoders.items():
            batch[name].append(_cpu_ms(encoder, texts) / len(texts))
        for text in texts:
            for name, encoder in encoders.items():
                single[name].append(_cpu_ms(encoder, [text]))
    return [
        {
            "encoder": name,
            "prompts": corpus.name,
            "p50_ms": float(np.quantile(single[name], 0.5)),
            "p99_ms": float(np.quantile(single[name], 0.99)),
            "prompts_per_s": 1e3 / float(np.mean(batch[name])),
        }
        for name in encoders
    ]


def _cpu_ms(encoder: Encoder, texts: Sequence[str]) -> float:
    start = time.thread_time()
    encoder.encode(texts)
    return 1e3 * (time.thread_time() - start)


def quality(
    encoders: Mapping[str, Encoder], train: Corpus, tests: Sequence[Corpus]
) -> list[dict[str, Any]]:
    """Rows of ``evaluation.evaluate`` for `retrieval` with each encoder."""
    rows = []
    for name, encoder in encoders.items():
        contender = Served(build_retrieval(train, Remembering(encoder)))
        for test in tests:
            for row in evaluate("retrieval", contender, test, trained_on=train.name):
                rows.append({**row, "encoder": name})
    return rows


def some(corpus: Corpus, size: int) -> Corpus:
    """So many prompts of a corpus, drawn with seed 0."""
    return corpus.take(np.random.default_rng(0).permutation(len(corpus))[:size])


def encoder_of(path: Path) -> Encoder:
    """The encoder of another `embed.py`."""
    spec = importlib.util.spec_from_file_location("old_embed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    encoder: Encoder = module.SentenceEncoder()
    return encoder


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print a Markdown table; a column's value is its format."""
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(form.format(row[key]) for key, form in columns.items()) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, metavar="FILE", help="embed.py of an earlier commit")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--num-train", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--num-test", type=int, default=400, help="of each set (default: 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    args = parser.parse_args()
    use_one_thread()
    encoders = {} if args.old is None else {"old": encoder_of(args.old)}
    encoders |= {name: SentenceEncoder(precision=name) for name in args.precisions}
    train, held_out = load("alpaca:vicuna-7b", args.data).split()
    tests = [some(held_out, args.num_test)]
    tests += [some(load(name, args.data), args.num_test) for name in ("arena", "sharegpt")]
    rows = [row for test in tests for row in speed(encoders, some(test, _NUM_TIMED))]
    show(
        rows,
        {"prompts": "{}", "encoder": "{}", "p50_ms": "{:.1f}", "p99_ms": "{:.1f}",
         "prompts_per_s": "{:.0f}"},
    )  # fmt: skip
    scores = quality(encoders, some(train, args.num_train), tests)
    scores.sort(key=lambda row: (row["tested_on"], row["num_learned"]))
    show(
        scores,
        {"tested_on": "{}", "num_learned": "{}", "encoder": "{}", "accuracy": "{:.3f}",
         "relative_error": "{:.3f}", "kendall_tau": "{:.3f}", "pinball": "{:.2f}"},
    )  # fmt: skip
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in [*rows, *scores])
        args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
