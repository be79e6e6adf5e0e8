"""How good placing is beside the optimum, and what it costs: Aladdin's Fig. 13, many instances.

Times are processor time of one process. Requests have lognormal lengths (chat), instances are the
measured Llama-3-8B on an A100 that ships.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.cluster.performance import PerformanceModel, load_performance
from sola_sched.cluster.placement import (
    Demand,
    Fleet,
    GroupedFleet,
    Phase,
    Tightness,
    best_fit,
    group_sizes,
    least_pressed,
    pack,
    place_exactly,
)
from sola_sched.cluster.placement.sizing import Workload, instances_needed
from sola_sched.errors import InfeasibleError

TTFT_S, TPOT_S = 2.0, 0.04
HEARTBEAT_S = 1.0
REPORTS_PER_S = 3.0
RUNNING = 60
EXTRA = 0.02  # e of Eq. 8: groups of at least 25 instances
_MODEL = "llama-3-8b-a100-tp1"
_CASES = 40
_RATES = (5.0, 25.0, 100.0, 300.0, 1000.0)
_INSTANCES = (10, 32, 100, 316, 1000)


def demands(rng: np.random.Generator, count: int) -> list[Demand]:
    """Requests of chat lengths with the same targets."""
    prompts = rng.lognormal(6.0, 1.0, count).clip(10, 4000)
    outputs = rng.lognormal(5.0, 0.9, count).clip(2, 1500)
    return [Demand(int(p), float(o), TTFT_S, TPOT_S) for p, o in zip(prompts, outputs, strict=True)]


def gap(setup: Setup) -> Outcome:
    """How many instances best fit takes beside the fewest possible."""
    model, cases = _model(), 4 if setup.is_quick else _CASES
    # What binds is another constraint in each row.
    binding: dict[str, tuple[PerformanceModel, Phase, float]] = {
        "KV memory": (_with_memory(model, 4000), Phase.BOTH, TPOT_S),
        "TPOT": (model, Phase.DECODE, 1.03 * float(model.decode_s(1, 4000))),
        "prompts within TTFT": (model, Phase.PREFILL, TPOT_S),
    }
    head = ["binds", "cases", "best fit", "optimum", "more", "cases at the optimum", "HiGHS s"]
    lines = []
    for name, (kind, phase, tpot_s) in binding.items():
        used, fewest, solving_s = [], [], 0.0
        for seed in range(cases):
            rng = np.random.default_rng(seed)
            ttft_s = 0.2 if phase is Phase.PREFILL else TTFT_S
            new = [replace(d, ttft_s=ttft_s, tpot_s=tpot_s) for d in demands(rng, 12)]
            try:
                packed = len(set(pack(Fleet([kind] * 12, phase=phase), new)))
                # No more instances than best fit took: fewer columns for the same optimum.
                began_s = time.process_time()
                exact = place_exactly(Fleet([kind] * packed, phase=phase), new, time_limit_s=30.0)
                solving_s += time.process_time() - began_s
            except InfeasibleError:
                continue  # one request is larger than an instance
            if exact.is_optimal:
                used.append(packed)
                fewest.append(exact.num_used)
        a, b = np.array(used), np.array(fewest)
        lines.append([
            name, str(len(a)), f"{a.mean():.2f}", f"{b.mean():.2f}",
            f"{100 * (a.sum() / b.sum() - 1):.1f} %", f"{100 * (a == b).mean():.0f} %",
            f"{solving_s / len(a):.2f}",
        ])  # fmt: skip
    about = "Instances for 12 requests: best fit (Algorithm 1) beside the optimum of HiGHS."
    return Outcome([], f"{about}\n\n{markdown(head, lines)}")


def rates(setup: Setup) -> Outcome:
    """The time to place what arrives in a heartbeat (Aladdin's Fig. 13)."""
    model, values = _model(), _RATES[: 2 if setup.is_quick else None]
    rng = np.random.default_rng(0)
    sample = demands(rng, 2000)
    workload = Workload(
        np.array([d.prompt_tokens for d in sample], dtype=np.float64),
        np.array([d.output_tokens for d in sample]), TTFT_S, TPOT_S,
    )  # fmt: skip
    head = ["requests/s", "instances", "one placement, ms a heartbeat", "groups", "each, ms"]
    lines = []
    for rate in values:
        number = instances_needed(model, workload, rate)
        new = demands(rng, max(1, round(rate * HEARTBEAT_S)))
        central_s = _seconds(partial(_place, _loaded(model, number, rng)), new)
        sizes = _sizes(number, rate)
        fleets = [_loaded(model, size, rng) for size in sizes]
        grouped_s = _seconds(partial(_place_in, GroupedFleet(fleets)), new)
        lines.append([
            f"{rate:g}", str(number), f"{1e3 * central_s:.1f}", str(len(sizes)),
            f"{1e3 * grouped_s / len(sizes):.1f}",
        ])  # fmt: skip
    about = "Time to place the requests of one second; Aladdin's Fig. 13 has 50 ms at 25 a second."
    return Outcome([], f"{about}\n\n{markdown(head, lines, 0)}")


def scale(setup: Setup) -> Outcome:
    """Time and memory over the number of instances, at 20 requests/s for each."""
    model, numbers = _model(), _INSTANCES[: 2 if setup.is_quick else None]
    head = ["instances", "requests/s", "us a request", "in groups, us", "report, us", "MB"]
    lines = []
    for number in numbers:
        rate = 20.0 * number
        rng = np.random.default_rng(0)
        new = demands(rng, 4000)
        tracemalloc.start()
        fleet = _loaded(model, number, rng)
        memory = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()
        # Between two reports of an instance so many requests are placed on the fleet.
        between = max(1, round(rate / REPORTS_PER_S))
        central_s = _with_reports([fleet], partial(_place, fleet), new, between, rng)
        fleets = [_loaded(model, size, rng) for size in _sizes(number, rate)]
        grouped_s = _with_reports(
            fleets, partial(_place_in, GroupedFleet(fleets)), new, between, rng
        )
        reported = range(min(number, 100))
        report_s = _seconds(partial(_report, fleet, rng), reported) / len(reported)
        lines.append([
            str(number), f"{rate:g}", f"{1e6 * central_s:.0f}", f"{1e6 * grouped_s:.0f}",
            f"{1e6 * report_s:.0f}", f"{memory:.1f}",
        ])  # fmt: skip
    about = "Processor time of one placement, 20 requests/s for each instance."
    return Outcome([], f"{about}\n\n{markdown(head, lines, 0)}")


def _model() -> PerformanceModel:
    return load_performance(_MODEL).model


def _with_memory(model: PerformanceModel, tokens: float) -> PerformanceModel:
    return replace(model, kv_capacity_bytes=tokens * model.kv.bytes_per_token)


def _sizes(number: int, rate: float) -> list[int]:
    if number < 50:
        return [number]
    # As many groups as Eq. 8 allows for the accepted extra: the least work for each placement.
    limit = rate / (number // round(1.0 / (2.0 * EXTRA)))
    return group_sizes(number, rate, extra_ratio=EXTRA, rate_limit_per_s=limit)


def _loaded(model: PerformanceModel, number: int, rng: np.random.Generator) -> Fleet:
    """Instances with requests under way, more on some than on others."""
    fleet = Fleet([model] * number, tightness=Tightness())
    for i in range(number):
        _report(fleet, rng, i)
    return fleet


def _report(fleet: Fleet, rng: np.random.Generator, i: int) -> None:
    count = int(rng.integers(0, 2 * RUNNING))
    held, left = rng.lognormal(6.2, 0.8, count), rng.lognormal(4.5, 0.9, count)
    fleet.set_requests(i, held, left, bank_s=float(rng.uniform(0.1, 2.0)), tpot_s=TPOT_S)


def _place(fleet: Fleet, demand: Demand) -> None:
    i = best_fit(fleet, demand)
    i = least_pressed(fleet, demand) if i is None else i
    if i is not None:
        fleet.add(i, demand)


def _place_in(groups: GroupedFleet, demand: Demand) -> None:
    if groups.place(demand) is None:
        groups.place_anyway(demand)


def _with_reports(
    fleets: Sequence[Fleet],
    place: Callable[[Demand], None],
    new: Sequence[Demand],
    between: int,
    rng: np.random.Generator,
) -> float:
    """Seconds a request; reports come in as often as requests ask for, and do not count."""
    placing_s, done = 0.0, 0
    while done < len(new):
        batch = new[done : done + between]
        placing_s += _seconds(place, batch)
        done += len(batch)
        for fleet in fleets:
            for i in range(len(fleet)):
                _report(fleet, rng, i)
    return placing_s / len(new)


def _seconds(do: Callable[[Any], None], items: Iterable[Any]) -> float:
    began_s = time.process_time()
    for item in items:
        do(item)
    return time.process_time() - began_s
