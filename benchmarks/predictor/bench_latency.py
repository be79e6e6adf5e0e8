"""Latency of one prediction, of search and aggregation, and of updates; on one thread.

    python -m sola_sched.length_predictor build \
        alpaca:vicuna-7b alpaca alpaca_eval arena sharegpt -o store.sola
    OMP_NUM_THREADS=1 python benchmarks/run.py predictor-latency --store store.sola

The file holds 50,000 entries of real prompts. Alpaca's, Arena's and ShareGPT's prompts are asked,
the last two longer than what is stored, with a word in front so that none is in the store as it is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.errors import ConfigError
from sola_sched.length_predictor.corpus import load
from sola_sched.length_predictor.lexical.features import describe
from sola_sched.length_predictor.retrieval.embed import SentenceEncoder
from sola_sched.length_predictor.retrieval.index import use_one_thread
from sola_sched.length_predictor.storage import load_lexical, load_retrieval

_NUM_PROMPTS = 200
_NUM_SEARCHES = 1000


def timed(call: Callable[[Any], Any], inputs: Sequence[Any]) -> dict[str, float]:
    """Milliseconds of single calls, after ten to warm up; and their time on the CPU.

    All of it is computed on the calling thread: the CPU time is what a call takes on an idle core,
    also where other processes interrupt it.
    """
    for each in inputs[:10]:
        call(each)
    wall, cpu = [], []
    for each in inputs:
        start, start_cpu = time.perf_counter(), time.thread_time()
        call(each)
        cpu.append(time.thread_time() - start_cpu)
        wall.append(time.perf_counter() - start)
    p50, p99 = np.quantile(wall, [0.5, 0.99]) * 1e3
    cpu_p50, cpu_p99 = np.quantile(cpu, [0.5, 0.99]) * 1e3
    return {
        "mean_ms": 1e3 * float(np.mean(wall)),
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "cpu_mean_ms": 1e3 * float(np.mean(cpu)),
        "cpu_p50_ms": float(cpu_p50),
        "cpu_p99_ms": float(cpu_p99),
    }


def measure(path: Path, data: Path | None) -> list[dict[str, Any]]:
    """Rows of everything that is timed."""
    from sola_sched.length_predictor.evaluation.proxy import ProxyModel

    rng = np.random.default_rng(0)
    prompts = {}
    for name in ("alpaca", "arena", "sharegpt"):
        every = load(name, data).prompts
        chosen = rng.permutation(len(every))[:_NUM_PROMPTS].tolist()
        prompts[name] = [every[place] for place in chosen]
    encoder = SentenceEncoder()
    retrieval, lexical = load_retrieval(path, encoder), load_lexical(path)
    store = retrieval.store
    proxy = ProxyModel()  # latency does not depend on its weights
    proxy.network.eval()
    rows: list[dict[str, Any]] = []

    def add(what: str, asked: str, figures: dict[str, float]) -> None:
        rows.append({"what": what, "prompts": asked, "entries": len(store), **figures})

    for asked, texts in prompts.items():
        # A word in front, so that no prompt is in the store as it is.
        fresh = [f"Please. {text}" for text in texts]
        add("lexical", asked, timed(lambda text: lexical.predict([text]), fresh))
        add("retrieval", asked, timed(lambda text: retrieval.predict([text]), fresh))
        add("proxy, FP32, 512 tokens", asked, timed(lambda text: proxy.quantiles([text]), fresh))
    repeated = list(store_prompts(store, load("alpaca", data).prompts))[:_NUM_PROMPTS]
    if repeated:
        figures = timed(lambda text: retrieval.predict([text]), repeated)
        add("retrieval, prompt is in the store", "alpaca", figures)
    proxy.quantize()
    for asked, texts in prompts.items():
        add("proxy, INT8, 512 tokens", asked, timed(lambda text: proxy.quantiles([text]), texts))

    texts = [f"Please. {text}" for name in prompts for text in prompts[name]]
    vectors = encoder.encode(texts)
    bases = retrieval.expectation([describe(text) for text in texts], vectors)
    places = rng.integers(0, len(texts), _NUM_SEARCHES).tolist()
    figures = timed(lambda i: store.search(vectors[i : i + 1], 32), places)
    add("search", "all", figures)
    figures = timed(lambda i: retrieval.aggregate(bases[i : i + 1], vectors[i : i + 1]), places)
    add("search and aggregation", "all", figures)
    batches = [np.arange(i, i + 64) % len(texts) for i in range(0, 64 * 100, 64)]

    def update(batch: Any) -> None:
        keys = rng.integers(0, 2**63, len(batch)).astype(np.uint64)
        store.add(vectors[batch], np.ones((len(batch), 2)), keys)

    add("update of 64 entries, store full", "all", timed(update, batches))
    return rows


def store_prompts(store: Any, texts: Sequence[str]) -> Any:
    """Prompts that the store knows."""
    from sola_sched.length_predictor.retrieval.predictor import prompt_key

    return (text for text in texts if store.num_of(prompt_key(text)))


def memory_mb(kind: str, path: Path) -> float:
    """Peak resident memory of a fresh process that loads one predictor and answers once."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "kind, path = sys.argv[1], Path(sys.argv[2])\n"
        "from sola_sched.length_predictor.process.service import ServiceSettings, make_predictor\n"
        "if kind == 'proxy':\n"
        "    from sola_sched.length_predictor.evaluation.proxy import ProxyModel\n"
        "    ProxyModel().quantiles(['Hello'])\n"
        "else:\n"
        "    make_predictor(ServiceSettings(kind, '', path=str(path))).predict(['Hello'])\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) / 1e3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, kind, str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def latency(setup: Setup) -> Outcome:
    """Times of each part, and the memory of each predictor; of stored rows the last of each."""
    if setup.is_stored:
        found = setup.all_rows()
    else:
        store = setup.options["store"]
        if store is None:
            raise ConfigError("'--store' must name the file of a retrieval predictor (got none).")
        use_one_thread()
        found = list(setup.keep(_rows(store, setup.data)))
    rows = list({(row["what"], row.get("prompts")): row for row in found}.values())
    columns = ("cpu_mean_ms", "cpu_p50_ms", "cpu_p99_ms", "p50_ms", "p99_ms")
    lines = [
        [row["what"], "", f"{row['peak_mb']:.0f} MB", "", "", "", ""]
        if "peak_mb" in row
        else [row["what"], row["prompts"], *(f"{row[column]:.3f}" for column in columns)]
        for row in rows
    ]
    head = ["what", "prompts", "CPU mean ms", "CPU p50", "CPU p99", "wall p50", "wall p99"]
    return Outcome(rows, markdown(head, lines, 2))


def _rows(store: Path, data: Path | None) -> Iterator[Row]:
    yield from measure(store, data)
    for kind in ("lexical", "retrieval", "proxy"):
        yield {"what": f"memory, {kind}", "peak_mb": memory_mb(kind, store)}
