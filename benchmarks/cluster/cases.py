"""One run of a cluster in virtual time: what decides it, and the row that it gives."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cluster import testbeds
from cluster.arrivals import Requests, make_requests
from harness import sweep
from harness.points import SYNTHETIC
from harness.resumable import Row
from harness.setup import Setup
from sola_sched.bench.backends.predictors import make_predictor
from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.placement import Phase
from sola_sched.cluster.placement.router import PackingRouter
from sola_sched.cluster.view import Router
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterEngine, ClusterRequest
from sola_sched.simulator.cluster.fast.instance import FastInstance
from sola_sched.simulator.cluster.faults import INSTANT, Links
from sola_sched.simulator.cluster.records import ClusterRecord, ClusterRun
from sola_sched.simulator.request import VirtualRequest
from sola_sched.workloads.workload import RequestSpec, Workload

#: Share of the requests at the start that is not counted: engines fill up first.
FILLING = 0.2
DATASETS = {
    "sharegpt": "sharegpt_lengths_llama2.csv.gz",
    "azure-conv": "azure_conv_2023.csv.gz",
    "azure-code": "azure_code_2023.csv.gz",
    "arxiv": "arxiv_summarization_lengths_llama2.csv.gz",
}
"""File of the data folder by name."""
ROUTERS: dict[str, Callable[[int], Router]] = ALL_ROUTERS | {
    "aladdin-decode": lambda seed: PackingRouter(phase=Phase.DECODE),
}
"""Those of the package, and Aladdin's for a decode pool."""
_LINKS = {"ray": Links(), "instant": INSTANT}


@dataclass(frozen=True)
class Case:
    """Everything that decides a run.

    Attributes:
        cluster: Its instances, see `testbeds.kinds`.
        scheduler: In every engine, as on the command line of `sola_sched.bench`.
        router: A key of `ROUTERS`.
        dataset: File in the data folder, or ``sharegpt-like``.
        rate_per_s: Of the whole cluster; inf sends all at once.
        ttft_s, tpot_s: Targets.
        arrivals: See `arrivals.make_requests`.
        num_requests: In all; those that come first are not counted (`FILLING`).
        output_factor: On the outputs of the data set, e.g. for a model that thinks first.
        seed: Of lengths, arrivals, router and delays.
        lengths: What routers know: ``histogram`` of what has ended, or a predictor of
            `sola_sched.bench.backends.predictors`, e.g. ``oracle``.
        is_real: With real schedulers instead of the fast model.
        is_decode: The instances are a decode pool: requests come with their prompts computed.
        links: ``ray``, the delays measured with Ray Serve, or ``instant``.
    """

    cluster: str
    scheduler: str
    router: str
    dataset: str
    rate_per_s: float
    ttft_s: float
    tpot_s: float
    arrivals: str = "poisson"
    num_requests: int = 1000
    output_factor: int = 1
    seed: int = 0
    lengths: str = "histogram"
    is_real: bool = False
    is_decode: bool = False
    links: str = "ray"

    @property
    def slo(self) -> SloTarget:
        """Targets of every request."""
        return SloTarget(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


def key_of(case: Case) -> str:
    """Changes with all that decides the row."""
    scheduler = case.scheduler if case.is_real else "stock"
    return sweep.make_key(asdict(case), scheduler, scripts=[Path(__file__)])


def run_case(case: Case, data: Path | None) -> Row:
    """The row of a case."""
    served = serve(case, data)
    row = asdict(case) | measures(case, served.records, served.run)
    row["cpu_s"], row["engine_s"] = round(served.cpu_s, 4), round(served.engine_s, 4)
    # Sent all at once; JSON has no number for it.
    row["rate_per_s"] = str(case.rate_per_s) if math.isinf(case.rate_per_s) else case.rate_per_s
    return row


class Served(NamedTuple):
    """What came of a case.

    Attributes:
        records: Those that count.
        run: All that happened.
        cpu_s: Processor time of the run, without that of building engines.
        engine_s: What the engines took of it: their steps, without the reports for the router.
    """

    records: list[ClusterRecord]
    run: ClusterRun
    cpu_s: float
    engine_s: float


def serve(case: Case, data: Path | None) -> Served:
    """Serve the requests of a case."""
    cluster = testbeds.kinds(case.cluster)
    longest = min(testbeds.step_profile(kind).max_model_len or 0 for kind in cluster)
    requests = make_requests(case, longest, data)
    engines: Sequence[ClusterEngine]
    start_s = 0.0
    if case.is_real:
        real = testbeds.real_instances(
            cluster, case.scheduler, case.slo, _warm_up(requests), case.seed, case.is_decode
        )
        start_s = float(math.ceil(max(instance.engine.clock.now for instance in real)))
        engines = real
    else:
        engines = [testbeds.fast_instance(kind, case.scheduler, case.is_decode) for kind in cluster]
        _load(testbeds.fast_instance(cluster[0], case.scheduler, case.is_decode), case)
    router = ROUTERS[case.router](case.seed)
    virtual = VirtualCluster(
        engines, router, links=_LINKS[case.links], seed=case.seed, start_s=start_s
    )
    specs = cluster_requests(case, requests, start_s)
    steps = Stopwatch(engines)
    began_s = time.process_time()
    run = virtual.run(specs)
    cpu_s = time.process_time() - began_s
    skipped = 0 if math.isinf(case.rate_per_s) else int(FILLING * len(run.records))
    return Served(list(run.records[skipped:]), run, cpu_s, steps.total_s)


def _load(instance: FastInstance, case: Case) -> None:
    """Use an instance once: what is compiled once on a machine, and read once in a process, is no
    time of a run."""
    request = VirtualRequest("first", 0.0, 2, prompt_len=2)
    instance.add(request, case.slo, LengthPrediction.exactly(2), 0.0)
    instance.advance(0.0)
    instance.view(0.0)


class Stopwatch:
    """Adds up what engines take to take in requests and to run their steps.

    Attributes:
        total_s: Processor time of this thread, seconds.
    """

    def __init__(self, engines: Iterable[ClusterEngine]) -> None:
        self.total_s = 0.0
        for engine in engines:
            engine.add = self._timed(engine.add)  # type: ignore[method-assign]
            engine.advance = self._timed(engine.advance)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_s = time.thread_time()
            answer = call(*args)
            self.total_s += time.thread_time() - began_s
            return answer

        return timed


def cluster_requests(case: Case, requests: Requests, start_s: float) -> list[ClusterRequest]:
    """The requests as the gateway gets them."""
    predict = None
    if case.lengths != "histogram":
        predict = make_predictor(case.lengths, case.seed)
    # No engine learns a length from its limit.
    longest = int(requests.outputs.max())
    made = []
    for i, (prompt, output, at_s) in enumerate(
        zip(
            requests.prompts.tolist(), requests.outputs.tolist(), requests.arrival_s.tolist(),
            strict=True,
        )
    ):  # fmt: skip
        length: LengthPrediction | None = None
        if predict is not None:
            length = predict(RequestSpec(f"r{i}", (0,), output, at_s))
        request = VirtualRequest(
            f"r{i}", start_s + at_s, output, prompt_len=prompt, max_tokens=longest
        )
        made.append(ClusterRequest(request, case.slo, length=length))
    return made


def measures(case: Case, records: Sequence[ClusterRecord], run: ClusterRun) -> dict[str, Any]:
    """Columns of a run."""
    # In a decode pool a first token has been delivered before; waiting counts as decoding.
    if case.is_decode:
        tpot = np.array(
            [(r.last_token_s - r.arrival_s) / max(1, r.num_output_tokens) for r in records]
        )
        ttft = np.zeros(len(records))
    else:
        ttft = np.array([r.ttft_s for r in records])
        tpot = np.nan_to_num([r.tpot_s for r in records])
    done = np.array([record.completed for record in records])
    met_ttft, met_tpot = done & (ttft <= case.ttft_s), done & (tpot <= case.tpot_s)
    first_s = min(record.arrival_s for record in run.records)
    last_s = max(record.last_token_s for record in run.records if record.completed)
    tokens = sum(r.num_prompt_tokens + r.num_output_tokens for r in run.records)
    return {
        "attainment": metrics.attainment_ratio((met_ttft & met_tpot).tolist()),
        "met_ttft": float(met_ttft.mean()),
        "met_tpot": float(met_tpot.mean()),
        "p99_ttft_s": float(np.percentile(ttft[done], 99)),
        "p99_tpot_s": float(np.percentile(tpot[done], 99)),
        "tokens_per_s": tokens / (last_s - first_s),
        "shares": [round(share, 3) for share in run.shares(len(testbeds.kinds(case.cluster)))],
    }


def _warm_up(requests: Requests) -> Workload:
    return Workload(
        tuple(
            RequestSpec(f"r{i}", (1,) * int(prompt), int(output), 0.0)
            for i, (prompt, output) in enumerate(
                zip(requests.prompts[:8], requests.outputs[:8], strict=True)
            )
        ),
        request_rate=1.0,
    )


def rows_of(setup: Setup, cases: Iterable[Case], title: str) -> list[Row]:
    """The rows of the cases, made where there are none; quick ones have few requests."""
    if setup.is_quick:
        cases = [replace(case, num_requests=60) for case in cases]
    return setup.rows_of(cases, key_of, functools.partial(run_case, data=setup.data), title)


def mean_by(
    rows: Iterable[Row], names: Sequence[str], value: str = "attainment"
) -> dict[tuple[Any, ...], float]:
    """Mean over the seeds of a column, by the values of others."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row[value])
    return {key: float(np.mean(values)) for key, values in groups.items()}


def file_of(setup: Setup, name: str) -> str:
    """File of a data set, or the made-up lengths where there is no data folder."""
    return DATASETS[name] if setup.data is not None else SYNTHETIC
