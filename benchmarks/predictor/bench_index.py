"""Which FAISS index: speed, recall and memory on the vectors of real prompts, one thread.

    python -m sola_sched.length_predictor build \
        alpaca:vicuna-7b alpaca alpaca_eval arena sharegpt -o store.sola
    OMP_NUM_THREADS=1 python benchmarks/run.py predictor-index --store store.sola

Random vectors would say nothing: they have no neighbours. 1,000 of the stored vectors are asked for
and left out of the index.
"""

from __future__ import annotations

import time
from typing import Any

import faiss
import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.errors import ConfigError
from sola_sched.length_predictor.storage import read_file

_NUM_QUERIES = 1000
_NUM_NEIGHBOURS = 32
_TRAINING = 20_000
#: FAISS's factory string and what is set before a search.
_INDEXES: tuple[tuple[str, dict[str, int]], ...] = (
    ("Flat", {}),
    ("SQ8", {}),
    ("IVF256,SQ8", {"nprobe": 8}),
    ("IVF256,SQ8", {"nprobe": 32}),
    ("IVF256,Flat", {"nprobe": 32}),
    ("HNSW32_SQ8", {"efSearch": 64}),
    ("HNSW32", {"efSearch": 64}),
)


def index(setup: Setup) -> Outcome:
    """Speed, recall, build time and size of each index."""
    if setup.options["store"] is None:
        raise ConfigError("'--store' must name the file of a retrieval predictor (got none).")
    faiss.omp_set_num_threads(1)
    _, arrays = read_file(setup.options["store"])
    # An exact prompt occurs more than once; its copies would be each other's neighbours.
    _, first = np.unique(arrays["store/keys"], return_index=True)
    vectors = arrays["store/vectors"][np.random.default_rng(0).permutation(first)]
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    queries, stored = vectors[:_NUM_QUERIES], vectors[_NUM_QUERIES:]
    similarity, truth = faiss.knn(
        queries, stored, _NUM_NEIGHBOURS, metric=faiss.METRIC_INNER_PRODUCT
    )
    nearest, high = np.quantile(similarity[:, 0], [0.5, 0.95])
    title = f"{len(stored):,} entries; nearest one: median {nearest:.2f}, 95 % {high:.2f}"
    lines = []
    built: dict[str, tuple[Any, float]] = {}
    for name, options in _INDEXES:
        if name not in built:
            built = {name: _build(name, stored)}
        made, seconds = built[name]
        for option, value in options.items():
            setattr(made if option == "nprobe" else made.hnsw, option, value)
        times, hits = [], 0
        for row, query in enumerate(queries):
            start = time.perf_counter()
            _, found = made.search(query[None], _NUM_NEIGHBOURS)
            times.append(time.perf_counter() - start)
            hits += len(set(found[0].tolist()) & set(truth[row].tolist()))
        p50, p99 = np.quantile(times, [0.5, 0.99]) * 1e3
        setting = ", ".join(f"{option} {value}" for option, value in options.items())
        recall = hits / len(queries) / _NUM_NEIGHBOURS
        size = len(faiss.serialize_index(made)) / 1e6
        lines.append([
            f"{name} {setting}", f"{p50:.3f}", f"{p99:.3f}", f"{recall:.3f}", f"{seconds:.1f}",
            f"{size:.0f}",
        ])  # fmt: skip
    head = ["index", "p50 ms", "p99 ms", "recall", "build s", "MB"]
    return Outcome([], f"{title}\n\n{markdown(head, lines)}")


def _build(name: str, stored: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    index: Any = faiss.index_factory(stored.shape[1], name, faiss.METRIC_INNER_PRODUCT)
    if name.startswith("HNSW"):
        index.hnsw.efConstruction = 100
    if not index.is_trained:
        index.train(stored[:_TRAINING])
    index.add(stored)
    return index, time.perf_counter() - start
