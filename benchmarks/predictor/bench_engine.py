"""What a predictor process costs the engine loop: the real CPU engine, predictor on and off.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/run.py predictor-engine

One engine serves a constant number of requests; each that ends is replaced. In blocks of steps, in
random order, the scheduler talks to its predictor process or does not. The same engine, the same
minutes: what is left between the two kinds of block is the predictor. The engine's CPU time, which
other processes do not change much, is compared likewise, and so are the medians of the steps
without a new prompt, which are all alike. The calls of the client (submit, poll, ended) are timed
one by one.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.bench.backends.model import cached_model
from sola_sched.length_predictor.process.client import PredictionClient, make_client

_WARM_UP_STEPS = 200
_OUTPUT_TOKENS = (40, 160)
_PROMPT_TOKENS = (20, 200)
_READY_TIMEOUT_S = 120.0
_NUM_RESAMPLES = 2000


class TimedClient:
    """A client whose calls on the scheduler's path are timed."""

    def __init__(self, client: PredictionClient) -> None:
        self._client = client
        self.total_s = 0.0

    def submit(self, *args: Any) -> None:
        start = time.perf_counter()
        self._client.submit(*args)
        self.total_s += time.perf_counter() - start

    def ended(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        self._client.ended(*args, **kwargs)
        self.total_s += time.perf_counter() - start

    def poll(self) -> Any:
        start = time.perf_counter()
        answers = self._client.poll()
        self.total_s += time.perf_counter() - start
        return answers


class Engine:
    """The real engine core in this process, under constant load."""

    def __init__(self, num_running: int, seed: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        config = EngineArgs(
            model=str(cached_model()),
            load_format="dummy",
            scheduler_cls="sola_sched.Scheduler",
            enforce_eager=True,
            max_num_seqs=num_running,
            disable_log_stats=True,
            additional_config={"sola_sched": {"log_interval_s": 0}},
        ).create_engine_config()
        self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        self.scheduler = self.core.scheduler
        self._rng = random.Random(seed)
        self._num_running = num_running
        self._next = 0

    def steps(self, count: int) -> tuple[float, float]:
        """Run steps; seconds of all, and the median of those without a new prompt."""
        times, bare = [], []
        for _ in range(count):
            is_bare = len(self.scheduler.requests) >= self._num_running
            while len(self.scheduler.requests) < self._num_running:
                self._add()
            start = time.perf_counter()
            _, executed = self.core.step_fn()
            self.core.post_step(executed)
            times.append(time.perf_counter() - start)
            if is_bare:
                bare.append(times[-1])
        return sum(times), statistics.median(bare or times)

    def _add(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        # Letters: the model's tokenizer knows single bytes.
        ids = [self._rng.randrange(40, 100) for _ in range(self._rng.randint(*_PROMPT_TOKENS))]
        request = EngineCoreRequest(
            request_id=f"r{self._next}",
            prompt_token_ids=ids,
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=self._rng.randint(*_OUTPUT_TOKENS), ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._next += 1
        made, wave = self.core.preprocess_add_request(request)
        self.core.add_request(made, wave)


def measure(kind: str, num_running: int, setup: Setup, seed: int) -> Row:
    """Blocks with and without one predictor; rates, their ratio and the client's own time."""
    from sola_sched.config.sola_config import SolaConfig

    num_pairs, block = setup.options["num_pairs"], setup.options["block"]
    engine = Engine(num_running, seed)
    model_config = engine.scheduler.vllm_config.model_config
    client = make_client(SolaConfig(predictor=kind), model_config)
    assert client is not None
    timed = TimedClient(client)
    try:
        give_up_s = time.monotonic() + _READY_TIMEOUT_S
        while not client.is_ready:
            client.poll()
            if time.monotonic() > give_up_s:
                raise SystemExit("error: the predictor process did not become ready.")
            time.sleep(0.05)
        engine.steps(_WARM_UP_STEPS)
        rng = random.Random(seed)
        losses: dict[str, list[float]] = {"loss": [], "bare_loss": [], "cpu_loss": []}
        off_s, calls_us, num_on = [], [], 0
        for _ in range(num_pairs):
            times = {}
            for is_on in rng.sample([True, False], 2):
                engine.scheduler.sola_predictions = timed if is_on else None
                timed.total_s = 0.0
                start_cpu = time.process_time()
                steps_s, bare_s = engine.steps(block)
                times[is_on] = (steps_s, bare_s, time.process_time() - start_cpu)
                if is_on:
                    num_on += block
                    calls_us.append(1e6 * timed.total_s / block)
            off_s.append(times[False][0])
            for values, on, off in zip(losses.values(), times[True], times[False], strict=True):
                values.append(on / off - 1.0)
        step_s = statistics.median(off_s) / block
        return {
            "predictor": kind,
            "num_running": num_running,
            "step_ms": 1e3 * step_s,
            **{key: value for name in losses for key, value in _median(name, losses[name], rng)},
            "client_us_per_step": statistics.median(calls_us),
            "client_share": statistics.median(calls_us) / (1e6 * step_s),
            "answered_per_step": client.counts["num_answered"] / num_on,
            "num_dropped": client.counts["num_dropped"],
            "num_pairs": num_pairs,
            "block": block,
            "seed": seed,
        }
    finally:
        engine.scheduler.sola_predictions = None
        client.close()
        engine.core.shutdown()


def _median(name: str, values: list[float], rng: random.Random) -> list[tuple[str, float]]:
    """The median, and the ends of its bootstrapped 95 % interval, by key of a row."""
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES)
    )
    ends = medians[_NUM_RESAMPLES // 40], medians[-_NUM_RESAMPLES // 40]
    keys = (name, f"{name}_low", f"{name}_high")
    return list(zip(keys, (statistics.median(values), *ends), strict=True))


def engine(setup: Setup) -> Outcome:
    """A row per predictor and number of requests."""
    if setup.is_stored:
        rows = setup.all_rows()
    else:
        choices = itertools.product(
            setup.options["predictors"], setup.options["num_running"], setup.seeds
        )
        measured = (measure(kind, running, setup, seed) for kind, running, seed in choices)
        rows = list(setup.keep(measured))
    head = ["predictor", "running", "step ms", "time (95 %)", "bare steps", "CPU time",
            "client µs/step"]  # fmt: skip
    lines = [
        [
            row["predictor"], str(row["num_running"]), f"{row['step_ms']:.2f}",
            *(_interval(row, name) for name in ("loss", "bare_loss", "cpu_loss")),
            f"{row['client_us_per_step']:.1f} ({row['client_share']:.2%})",
        ]
        for row in rows
    ]  # fmt: skip
    return Outcome(rows, markdown(head, lines))


def _interval(row: Row, name: str) -> str:
    if name not in row:
        return "–"
    return f"{row[name]:.2%} ({row[f'{name}_low']:.2%} to {row[f'{name}_high']:.2%})"
