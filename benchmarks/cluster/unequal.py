"""The heterogeneous paper's Fig. 4 to 6: which deployment, and which router, in tokens/s."""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster import testbeds
from cluster.cases import Case, file_of, mean_by, rows_of
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.parts import chosen
from harness.points import read_lengths
from harness.setup import Outcome, Setup
from sola_sched.cluster.performance.from_profile import samples_of_profile
from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.cluster.unequal.throughput import (
    Estimate,
    estimate_refilled,
    estimate_throughput,
)

_MACHINE_GPUS = 8
_DEGREES = (1, 2, 4, 8)
_SAMPLE = 200
_LINKS = {"NVLink": "v100-nvlink", "PCIe": "v100-pcie"}
_SLOTS = 256
_REQUESTS = 4000


class Cluster(NamedTuple):
    """Unequal instances, and the rates looked at.

    Attributes:
        instances: See `testbeds.kinds`.
        output_factor: The paper's model on the second cluster thinks before it answers
            (DeepSeek-R1-Distill-Qwen-14B): four times the outputs of ShareGPT.
        without: Routers left out: one engine alone takes hours of virtual time for these.
    """

    instances: str
    rates_per_s: tuple[float, ...]
    output_factor: int = 1
    without: tuple[str, ...] = ()


_PAIR = "1*llama-3-8b@{gpu}:4+1*llama-3-8b@{gpu}:1"
_TWO_MACHINES = "4*qwen2.5-14b@v100-nvlink:2+1*qwen2.5-14b@a100-pcie:1"
#: Two instances of Llama-3-8B on one machine of V100 (section 5.2); four of a 14B model on V100
#: with one on an A800 (section 5.3).
CLUSTERS = {
    "V100 t=4, t=1": Cluster(_PAIR.format(gpu="v100-nvlink"), (2.0, 8.0, 24.0, math.inf)),
    "the same over PCIe": Cluster(_PAIR.format(gpu="v100-pcie"), (24.0,)),
    "4 V100 t=2, A800": Cluster(_TWO_MACHINES, (16.0,)),
    "the same, outputs x 4": Cluster(_TWO_MACHINES, (16.0,), output_factor=4, without=("single",)),
}
ROUTERS = {
    "round robin": "round-robin",
    "single": "single",
    "weighted": "weighted-round-robin",
    "memory based": "memory",
    "the paper's": "workload",
    "least TTFT": "least-ttft",
    "combined": "combined",
}
#: Nothing is late here: throughput is what the paper looks at.
_TTFT_S, _TPOT_S = 30.0, 0.2


def deployment(setup: Setup) -> Outcome:
    """Fig. 4: the estimated throughput of each degree beside that of the simulator."""
    file = file_of(setup, "sharegpt")
    cases = [
        Case(
            _machine(gpu, t), "stock:2048", "shortest-queue", file, math.inf, _TTFT_S, _TPOT_S,
            num_requests=_REQUESTS, seed=seed,
        )
        for gpu in _LINKS.values()
        for t in _DEGREES
        for seed in setup.seeds
    ]  # fmt: skip
    rows = rows_of(setup, cases, "Fig. 4")
    measured = mean_by(rows, ("cluster",), "tokens_per_s")
    lines, verdicts = [], []
    for link, gpu in _LINKS.items():
        found = {t: measured[(_machine(gpu, t),)] for t in _DEGREES}
        estimated = {
            estimate: {t: _estimate(setup, gpu, t, file, estimate) for t in _DEGREES}
            for estimate in (estimate_throughput, estimate_refilled)
        }
        lines += [
            [link, str(t), str(_MACHINE_GPUS // t), *(f"{by[t]:,.0f}" for by in estimated.values()),
             f"{found[t]:,.0f}"]
            for t in _DEGREES
        ]  # fmt: skip
        static, refilled = (_order(by) for by in estimated.values())
        verdicts.append(
            f"{link}: {static} by Algorithm 1, {refilled} by refilled batches, {_order(found)} by "
            "the simulator."
        )
    about = (
        "Eight V100, Llama-3-8B: tokens/s of the machine by Algorithm 1, which has static batches, "
        "by the same with batches that are refilled, and by the simulator with "
        f"{_REQUESTS:,} requests at once. Degrees from most to least tokens/s, which by the paper "
        f"are 2, 4, 1, 8. {' '.join(verdicts)}"
    )
    head = ["link", "t", "instances", "Algorithm 1", "refilled", "simulated"]
    return Outcome(rows, f"{about} {error_of(setup, 'tokens_per_s')}\n\n{markdown(head, lines)}")


def routers(setup: Setup) -> Outcome:
    """Fig. 5 and 6: throughput by router over the rate, on two unequal clusters."""
    file = file_of(setup, "sharegpt")
    clusters = {name: CLUSTERS[name] for name in chosen(setup, CLUSTERS)}
    cases = [
        _case(setup, cluster, router, file, rate, seed)
        for cluster in clusters.values()
        for rate in cluster.rates_per_s
        for router in ROUTERS.values()
        if router not in cluster.without
        for seed in setup.seeds
    ]
    alone = [
        _case(
            setup, cluster._replace(instances=kind), "single", file, math.inf, seed, _REQUESTS // 2
        )
        for cluster in clusters.values()
        for kind in dict.fromkeys(map(str, testbeds.kinds(cluster.instances)))
        for seed in setup.seeds
    ]
    rows = rows_of(setup, cases + alone, "Fig. 5, 6")
    names = ("cluster", "output_factor", "rate_per_s", "router")
    speed = mean_by(rows, names, "tokens_per_s")
    lines = []
    for name, cluster in clusters.items():
        factor = cluster.output_factor
        all_busy = sum(
            speed.get((str(kind), factor, str(math.inf), "single"), math.nan)
            for kind in testbeds.kinds(cluster.instances)
        )
        for rate in cluster.rates_per_s:
            at = str(rate) if math.isinf(rate) else rate
            each = {
                label: speed.get((cluster.instances, factor, at, router), math.nan)
                for label, router in ROUTERS.items()
            }
            if math.isnan(each["round robin"]):
                continue  # with --stored, of rows that are not there
            base = each["round robin"]
            cells = [f"{base:,.0f}"]
            cells += [
                "-" if math.isnan(v) else f"{100 * (v / base - 1):+.1f} %"
                for v in [*list(each.values())[1:], all_busy]
            ]
            lines.append([name, "at once" if math.isinf(rate) else f"{rate:g}", *cells])
    head = ["cluster", "req/s", "round robin, tokens/s", *list(ROUTERS)[1:], "all busy"]
    about = (
        "Tokens/s of prompts and outputs from the first arrival to the last token, against round "
        f"robin; {_REQUESTS:,} requests, vLLM with a chunk of 2048 in the engines. The paper "
        "reports +122.5 % on the first cluster at 24 requests/s and +33.6 % on the second at 16. "
        "*All busy* is what the instances serve each alone, half as many requests at once, in sum."
    )
    return Outcome(rows, f"{about} {error_of(setup, 'tokens_per_s')}\n\n{markdown(head, lines, 2)}")


def _machine(gpu: str, degree: int) -> str:
    return f"{_MACHINE_GPUS // degree}*llama-3-8b@{gpu}:{degree}"


def _order(tokens_per_s: dict[int, float]) -> str:
    return ", ".join(map(str, sorted(tokens_per_s, key=lambda t: -tokens_per_s[t])))


def _case(
    setup: Setup,
    cluster: Cluster,
    router: str,
    file: str,
    rate_per_s: float,
    seed: int,
    num_requests: int = _REQUESTS,
) -> Case:
    longest = min(
        testbeds.step_profile(k).max_model_len or 0 for k in testbeds.kinds(cluster.instances)
    )
    # Of lengths the paper's routers know mean and spread, and draw a prediction from them; here it
    # is the mean.
    mean = cluster.output_factor * float(read_lengths(file, longest, setup.data).output.mean())
    return Case(
        cluster.instances, "stock:2048", router, file, rate_per_s, _TTFT_S, _TPOT_S,
        num_requests=num_requests, output_factor=cluster.output_factor, seed=seed,
        lengths=f"constant:{mean:.0f}",
    )  # fmt: skip


def _estimate(setup: Setup, gpu: str, degree: int, file: str, estimate: Estimate) -> float:
    """Tokens/s of the machine by a sample of the lengths for each seed, the mean of them."""
    profile = testbeds.step_profile(testbeds.Kind("llama-3-8b", gpu, degree))
    assert profile.num_blocks is not None
    assert profile.max_model_len is not None
    prefill, decode, _ = samples_of_profile(profile)
    batch_time, _ = StaticBatchTime.fit(prefill, decode)
    table = read_lengths(file, profile.max_model_len, setup.data)
    lengths = list(zip(table.prompt.tolist(), table.output.tolist(), strict=True))
    tokens = float((profile.num_blocks - 1) * profile.block_size)
    found = [
        estimate(
            batch_time, tokens, 1.0, lengths[seed * _SAMPLE : (seed + 1) * _SAMPLE],
            num_instances=_MACHINE_GPUS // degree, max_requests=_SLOTS,
        )
        for seed in setup.seeds
    ]  # fmt: skip
    return sum(found) / len(found)
