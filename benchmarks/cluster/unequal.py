"""The heterogeneous paper's Fig. 4 to 6: which deployment, and which router, in tokens/s."""

from __future__ import annotations

import math

from cluster import testbeds
from cluster.cases import Case, file_of, mean_by, rows_of
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.parts import chosen
from harness.points import read_lengths
from harness.setup import Outcome, Setup
from sola_sched.cluster.performance.from_profile import samples_of_profile
from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.cluster.unequal.deployment import estimate_throughput

_MACHINE_GPUS = 8
_DEGREES = (1, 2, 4, 8)
_SAMPLE = 200
#: Two instances of Llama-3-8B on one machine of V100 (section 5.2); four of a 14B model on V100
#: with one on an A800 (section 5.3).
CLUSTERS = {
    "V100 t=4, t=1": "1*llama-3-8b@v100-pcie:4+1*llama-3-8b@v100-pcie:1",
    "4 V100 t=2, A800": "4*qwen2.5-14b@v100-pcie:2+1*qwen2.5-14b@a100-pcie:1",
}
_RATES = {
    "V100 t=4, t=1": (4.0, 8.0, 16.0, math.inf),
    "4 V100 t=2, A800": (16.0,),
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
            f"{_MACHINE_GPUS // t}*llama-3-8b@v100-pcie:{t}", engine, "shortest-queue", file,
            math.inf, _TTFT_S, _TPOT_S, num_requests=800, seed=seed,
        )
        for t in _DEGREES
        for engine in ("stock:2048",)
        for seed in setup.seeds
    ]  # fmt: skip
    rows = rows_of(setup, cases, "Fig. 4")
    measured = mean_by(rows, ("cluster",), "tokens_per_s")
    lines, order = [], []
    for t in _DEGREES:
        kind = testbeds.Kind("llama-3-8b", "v100-pcie", t)
        estimates = [_estimate(setup, kind, file, seed) for seed in setup.seeds]
        estimated = _MACHINE_GPUS // t * sum(estimates) / len(estimates)
        found = measured[(f"{_MACHINE_GPUS // t}*llama-3-8b@v100-pcie:{t}",)]
        order.append((estimated, found))
        lines.append([str(t), str(_MACHINE_GPUS // t), f"{estimated:,.0f}", f"{found:,.0f}"])
    by_estimate = sorted(range(len(order)), key=lambda i: -order[i][0])
    by_simulator = sorted(range(len(order)), key=lambda i: -order[i][1])
    verdict = "the same" if by_estimate == by_simulator else "not the same"
    about = (
        "Eight V100 on PCIe, Llama-3-8B: tokens/s of the machine by Algorithm 1, which has static "
        f"batches, and by the simulator with all requests at once. The order is {verdict}: "
        f"t = {', '.join(str(_DEGREES[i]) for i in by_estimate)} by the estimate, "
        f"t = {', '.join(str(_DEGREES[i]) for i in by_simulator)} by the simulator."
    )
    head = ["t", "instances", "estimated tokens/s", "simulated tokens/s"]
    return Outcome(rows, f"{about} {error_of(setup, 'tokens_per_s')}\n\n{markdown(head, lines)}")


def routers(setup: Setup) -> Outcome:
    """Fig. 5 and 6: throughput by router over the rate, on two unequal clusters."""
    names = chosen(setup, CLUSTERS)
    file = file_of(setup, "sharegpt")
    cases = [
        Case(
            CLUSTERS[name], "stock:2048", router, file, rate, _TTFT_S, _TPOT_S,
            num_requests=600, seed=seed,
        )
        for name in names
        for rate in _RATES[name]
        for router in ROUTERS.values()
        for seed in setup.seeds
    ]  # fmt: skip
    kinds = sorted({str(kind) for name in names for kind in testbeds.kinds(CLUSTERS[name])})
    alone = [
        Case(
            kind, "stock:2048", "single", file, math.inf, _TTFT_S, _TPOT_S,
            num_requests=600, seed=seed,
        )
        for kind in kinds
        for seed in setup.seeds
    ]  # fmt: skip
    rows = rows_of(setup, cases + alone, "Fig. 5, 6")
    speed = mean_by(rows, ("cluster", "rate_per_s", "router"), "tokens_per_s")
    lines = []
    for name in names:
        all_busy = sum(
            speed.get((str(kind), str(math.inf), "single"), math.nan)
            for kind in testbeds.kinds(CLUSTERS[name])
        )
        for rate in _RATES[name]:
            at = str(rate) if math.isinf(rate) else rate
            each = {
                label: speed.get((CLUSTERS[name], at, router), math.nan)
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
        "robin; vLLM with a chunk of 2048 in the engines. The paper reports +122.5 % on the first "
        "cluster at 24 requests/s and +33.6 % on the second at 16. *All busy* is what the "
        "instances serve each alone, all requests at once, in sum: no router can do more."
    )
    return Outcome(rows, f"{about} {error_of(setup, 'tokens_per_s')}\n\n{markdown(head, lines, 2)}")


def _estimate(setup: Setup, kind: testbeds.Kind, file: str, seed: int) -> float:
    """Algorithm 1 for one instance on a sample of the lengths, tokens/s."""
    profile = testbeds.step_profile(kind)
    assert profile.num_blocks is not None
    assert profile.max_model_len is not None
    prefill, decode, _ = samples_of_profile(profile)
    batch_time, _ = StaticBatchTime.fit(prefill, decode)
    table = read_lengths(file, profile.max_model_len, setup.data)
    first = seed * _SAMPLE
    sample = list(
        zip(
            table.prompt[first : first + _SAMPLE].tolist(),
            table.output[first : first + _SAMPLE].tolist(),
            strict=True,
        )
    )
    tokens = (profile.num_blocks - 1) * profile.block_size
    return estimate_throughput(batch_time, float(tokens), 1.0, sample, max_requests=256)
