"""What turns do for engines that share a core: attainment, the cost of a turn, a killed holder."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from colocation.pair import Pair, Service, group, pair
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.bench.backends.model import ModelShape
from sola_sched.colocation.folder import Folder
from sola_sched.colocation.lease import Lease
from sola_sched.colocation.table import Table
from sola_sched.config.slo import SloTarget

#: Its steps are longer than the slices of time in which a system shares a core by itself.
SHAPE = ModelShape(256, 768, 6, 4, 2, 2048, 2048, "float32")
#: Short answers in bursts that must come fast, and long prompts that have time, where one token of
#: the first alone takes `_STEP_S`. Where it takes longer, so do all these times.
SERVICES = (
    Service("chat", 150, 50, 4.0, 0.3, SloTarget(0.4, 0.025)),
    Service("summaries", 700, 20, 1.0, 1.0, SloTarget(4.0, 0.25)),
)
_STEP_S = 0.0105
SHARE = 0.1
ARMS = {
    "vLLM, 128": ("stock:128", False),
    "vLLM, 512": ("stock:512", False),
    "vLLM, 2048": ("stock:2048", False),
    "sola_sched, free": ("sola:512", False),
    "sola_sched, turns": ("sola:512", True),
}
#: The core that both engines have; the benchmark itself runs on another one.
_CORE = 1
_KILLS = 8


def colocation(setup: Setup) -> Outcome:
    """Attainment of both services on one core, with and without turns; then kills."""
    seconds = 5.0 if setup.is_quick else 10.0
    found: dict[tuple[str, str], list[float]] = {}
    seeds = setup.seeds[:1] if setup.is_quick else setup.seeds
    with pair(SERVICES, SHAPE, _CORE) as engines:
        step_s = _step_alone_s(engines, seconds)
        factor = step_s / _STEP_S
        engines.services = [service.scaled(factor) for service in SERVICES]
        for number, seed in enumerate(seeds):
            arms = list(ARMS) if number % 2 == 0 else list(reversed(ARMS))
            for arm in arms:
                for service, attained in _attained(engines, arm, seconds * factor, seed).items():
                    found.setdefault((arm, service), []).append(attained)
    pauses = [pause_at_a_kill(seed) for seed in range(1 if setup.is_quick else _KILLS)]
    lines = [
        [arm, *(_shares(found[arm, service.name]) for service in SERVICES),
         f"{100 * min(np.mean(found[arm, s.name]) for s in SERVICES):.1f} %"]
        for arm in ARMS
    ]  # fmt: skip
    head = ["both engines", *(s.name for s in SERVICES), "the worse of both"]
    return Outcome(
        [],
        f"Two engines of vLLM's CPU build on one core ({SHAPE.name} each), "
        f"{seconds * factor:.1f} s a run, seeds {', '.join(map(str, seeds))} in alternating order; "
        f"requests within both targets, mean (each seed). One token of {SERVICES[0].name} takes "
        f"{1e3 * step_s:.1f} ms where nothing runs beside it; rates and targets go by that.\n\n"
        f"{_about(engines.services)}\n\n"
        + markdown(head, lines)
        + "\n\nOne engine is killed (SIGKILL) in its turn while both decode. The most that this "
        "costs the other is the time from the kill until each of its requests has a token again. "
        "Beside it the longest time between two tokens in the second before, and the time in which "
        "the system ended the process and so set the turn free.\n\n"
        + markdown(
            ["kill", "longest before, ms", "process gone after, ms", "all have a token after, ms"],
            [[str(n), *(f"{ms:.0f}" for ms in pause)] for n, pause in enumerate(pauses)],
        ),
    )  # fmt: skip


def _step_alone_s(engines: Pair, seconds: float) -> float:
    """Median time between two tokens of the first service while the second one's engine rests."""
    engines.begin("stock:512", [None, None], seconds, 0, only=0)
    records, _ = engines.result(0)
    return float(
        np.median([b - a for r in records for a, b in itertools.pairwise(r.token_times_s)])
    )


def _attained(engines: Pair, arm: str, seconds: float, seed: int) -> dict[str, float]:
    scheduler, with_turns = ARMS[arm]
    with group() as name:
        options = {"group": name, "share": SHARE} if with_turns else None
        engines.begin(scheduler, [options] * len(SERVICES), seconds, seed)
        shares = {}
        for number, service in enumerate(engines.services):
            records, _ = engines.result(number)
            shares[service.name] = float(np.mean([r.attains(service.slo) for r in records]))
    return shares


def _about(services: Sequence[Service]) -> str:
    return markdown(
        ["service", "prompt", "output", "req/s", "burstiness", "TTFT, s", "TPOT, ms"],
        [
            [s.name, str(s.prompt_tokens), str(s.output_tokens), f"{s.rate_per_s:.2g}",
             f"{s.burstiness:g}", f"{s.slo.ttft_s:.2f}", f"{1e3 * s.slo.tpot_s:.0f}"]
            for s in services
        ],
    )  # fmt: skip


def _shares(values: Sequence[float]) -> str:
    each = ", ".join(f"{100 * value:.0f}" for value in values)
    return f"{100 * np.mean(values):.1f} % ({each})"


# A kill ---------------------------------------------------------------------------------------

_STEADY = SloTarget(10.0, 1.0)
#: So long that both always decode.
_VICTIM = Service("victim", 100, 600, 3.0, 1.0, _STEADY)
_OTHER = replace(_VICTIM, name="other")


class Pause(NamedTuple):
    """Milliseconds around a kill.

    Attributes:
        before: Longest time between two tokens of a request of the other in the second before.
        gone: From the kill until the process has ended.
        next_token: From the kill until each request of the other that decodes has a token again.
    """

    before: float
    gone: float
    next_token: float


def pause_at_a_kill(seed: int, shape: ModelShape = SHAPE) -> Pause:
    """What the kill of an engine in its turn costs the other."""
    with group() as name, pair((_VICTIM, _OTHER), shape, _CORE) as engines:
        options = {"group": name, "share": SHARE}
        engines.begin("sola:512", [options, options], 6.0, seed)
        time.sleep(3.0)
        victim = engines.processes[0]
        assert victim.pid is not None
        table = Table(Folder(Path(name)), 10.0)
        slots = {member.pid: slot for slot, member in table.members().items()}
        while table.holder[0] != slots[victim.pid]:
            time.sleep(1e-4)
        time.sleep(2e-3)  # into the step
        os.kill(victim.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        table.close()
        victim.join()
        gone_s = time.monotonic() - killed_s
        records, stats = engines.result(1)
        assert all(record.completed for record in records), "a request of the other was lost"
        assert stats.num_taken_over >= 1, "the victim was not killed in its turn"
        at_s = killed_s - engines.started_s
        pauses = [
            (before_s, after_s)
            for record in records
            for before_s, after_s in itertools.pairwise(record.token_times_s)
        ]
        before = max(after - begin for begin, after in pauses if at_s - 1.0 <= after < at_s)
        next_token = max(after - at_s for begin, after in pauses if begin < at_s <= after)
        return Pause(1e3 * before, 1e3 * gone_s, 1e3 * next_token)


# The cost of a turn ---------------------------------------------------------------------------


def turns(setup: Setup) -> Outcome:
    """Microseconds of a turn, between plain processes."""
    count = 2_000 if setup.is_quick else 20_000
    with group() as name:
        lease = Lease(name, name="me", share=0.0, limit_s=10.0)
        kept = _loop_us(lease, count, wants_more=True)
        lease.give(None)
        free = _loop_us(lease, count // 10, wants_more=False)
        passed = _passed_us(lease, name, count // 20)
        deaths = [_death_us(lease, name) for _ in range(10)]
        lease.close()
    lines = [
        ["kept, nobody waits", *_percentiles(kept)],
        ["given back and taken, nobody waits", *_percentiles(free)],
        ["passed on to a process that waits", *_percentiles(passed)],
        ["taken over from a killed holder", *_percentiles(deaths)],
    ]
    return Outcome([], markdown(["a turn that is", "median, µs", "90 %, µs", "99 %, µs"], lines))


def _urgent() -> float:
    return 0.0


def _loop_us(lease: Lease, count: int, *, wants_more: bool) -> list[float]:
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        lease.take(_urgent)
        lease.give(_urgent if wants_more else None)
        times.append(1e6 * (time.perf_counter() - started_s))
    return times


def _partner(name: str, count: int, line: Connection) -> None:
    lease = Lease(name, name="partner", share=0.0, limit_s=10.0)
    line.send(None)
    times = []
    for _ in range(count):
        lease.take(_urgent)
        taken_s = time.monotonic()
        time.sleep(1e-3)  # a short step
        times.append((taken_s, time.monotonic()))
        lease.give(_urgent)
    lease.give(None)
    line.send(times)
    line.recv()
    lease.take(_urgent)
    line.send(None)
    time.sleep(60.0)


def _start(name: str, count: int) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("fork")
    line, theirs = context.Pipe()
    process = context.Process(target=_partner, args=(name, count, theirs), daemon=True)
    process.start()
    line.recv()
    return process, line


def _passed_us(lease: Lease, name: str, count: int) -> list[float]:
    """From the end of a step to the return of the other's wait."""
    process, line = _start(name, count)
    mine = []
    while not line.poll(0):
        lease.take(_urgent)
        taken_s = time.monotonic()
        time.sleep(1e-3)
        mine.append((taken_s, time.monotonic()))
        lease.give(_urgent)
    lease.give(None)
    theirs = line.recv()
    process.kill()
    process.join()
    order = sorted([(*t, 0) for t in mine] + [(*t, 1) for t in theirs])
    return [
        1e6 * (after[0] - before[1])
        for before, after in itertools.pairwise(order)
        if before[2] != after[2]
    ]


def _death_us(lease: Lease, name: str) -> float:
    process, line = _start(name, 0)
    line.recv()
    line.send(None)
    line.recv()
    started_s = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    lease.take(_urgent)
    taken_us = 1e6 * (time.monotonic() - started_s)
    lease.give(None)
    process.join()
    return taken_us


def _percentiles(values: Sequence[float]) -> list[str]:
    return [f"{np.percentile(values, q):,.0f}" for q in (50, 90, 99)]
