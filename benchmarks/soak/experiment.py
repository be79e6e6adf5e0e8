"""Everything at once on the real engine behind the gateway: what grows, and what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from harness.command import ROOT
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from soak import census, verdict
from soak.disturb import calm, disturb, start
from soak.engines import ENGINES, Servers, of_process, servers
from soak.traffic import ANSWERED, LEFT, REFUSED, Clients, clients, offer, served_per_s

Row = dict[str, Any]
#: Of what is served.
OVERLOAD = 1.5
_NUM_PHASES = 12
_QUICK_PHASES = 4
_NUM_SAMPLES = 120
_NUM_CLIENTS = 48
_QUICK_MINUTES = 1.0
#: Without requests: reports come, and connections that are kept are closed. aiohttp looks for them
#: every 15 s and closes those that have been idle for as long.
_QUIET_S = 31.0
_MIB = 1024


def soak(setup: Setup) -> Outcome:
    """Rows of one soak: a sample now and then, and at the end what became of the requests.

    Raises:
        SystemExit: Something grew, or a request had no proper answer.
    """
    minutes = _QUICK_MINUTES if setup.is_quick else float(setup.options["minutes"])
    rows = setup.all_rows() if setup.is_stored else list(setup.keep(run(minutes, setup.seeds[0])))
    last = [row for row in rows if row["run"] == rows[-1]["run"]]
    outcome, idle = last[-1], [row for row in last if row.get("is_idle")]
    found = verdict.problems(outcome, idle)
    shown = table(outcome, idle)
    if found:
        raise SystemExit(f"{shown}\n\nerror: the soak has failed:\n" + "\n".join(found))
    return Outcome(last, shown)


def run(minutes: float, seed: int = 0) -> Iterator[Row]:
    """The rows of a soak."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        asyncio.run(_Soak(folder, 60.0 * minutes, seed, rows).run())
    except BaseException:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"The logs and the rows so far are in {folder}.", file=sys.stderr)
        raise
    yield from rows
    shutil.rmtree(folder)


class _Soak:
    def __init__(self, folder: Path, seconds: float, seed: int, rows: list[Row]) -> None:
        self._folder, self._seconds, self._seed, self._rows = folder, seconds, seed, rows
        self._name = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._num_phases = _NUM_PHASES if seconds > 300 else _QUICK_PHASES
        self._began_s = time.monotonic()
        self._num_censuses = 0
        self._disturbed: Counter[str] = Counter()

    async def run(self) -> None:
        from cutting import cutting

        async with (
            servers(self._folder, cutting) as there,
            clients(there.gateway_url, self._seed) as asking,
            aiohttp.ClientSession() as own,
        ):
            await asking.learn()
            await start(there, own)
            calm_s = max(10.0, self._seconds / 30)
            await served_per_s(asking, _NUM_CLIENTS, calm_s / 2)
            rate = await served_per_s(asking, _NUM_CLIENTS, calm_s)
            if not rate:
                raise RuntimeError(f"requests must be answered (got {asking.examples}).")
            print(f"served: {rate:.1f} requests/s; offered: {OVERLOAD * rate:.1f}", flush=True)
            self._began_s = time.monotonic()
            watching = asyncio.create_task(self._watch(there, asking))
            try:
                for phase in range(self._num_phases):
                    await self._phase(there, asking, own, OVERLOAD * rate, phase)
            finally:
                watching.cancel()
            self._rows.append(self._outcome(there, asking, rate))

    async def _phase(
        self, there: Servers, asking: Clients, own: aiohttp.ClientSession, rate: float, phase: int
    ) -> None:
        """Overload for a while, then no requests, and a look at what is left."""
        seconds = self._seconds / self._num_phases
        every_s = max(1.0, seconds / 20)
        disturbing = asyncio.create_task(disturb(there, own, every_s, self._disturbed, phase))
        await offer(asking, rate, seconds, self._seed + phase)
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
        await asking.until_all_ended()
        calm(there)
        await asyncio.sleep(_QUIET_S)
        row = self._sample(there, asking)
        self._num_censuses += 1
        census.ask(self._folder, self._num_censuses)
        for process, held in row["processes"].items():
            while (found := census.taken(self._folder, process, self._num_censuses)) is None:
                await asyncio.sleep(0.1)
            held |= {name: found[name] for name in ("objects", "tasks", "tables")}
        self._rows.append(row | {"is_idle": True})
        print(f"{row['at_s']:.0f} s: {dict(asking.outcomes)}", flush=True)

    async def _watch(self, there: Servers, asking: Clients) -> None:
        while True:
            self._rows.append(self._sample(there, asking))
            await asyncio.sleep(self._seconds / _NUM_SAMPLES)

    def _sample(self, there: Servers, asking: Clients) -> Row:
        return {
            "run": self._name,
            "at_s": round(time.monotonic() - self._began_s, 1),
            "num_sent": asking.num_sent,
            "num_under_way": asking.num_under_way,
            "processes": {name: of_process(pid) for name, pid in there.pids.items()},
        }

    def _outcome(self, there: Servers, asking: Clients, rate: float) -> Row:
        gateway = _metrics(there.admin_url)
        engines = {name: _metrics(url) for name, url in there.urls.items()}
        from soak.faulty import num_failures

        return {
            "run": self._name,
            "minutes": round(self._seconds / 60, 2),
            "served_per_s": round(rate, 2),
            "num_sent": asking.num_sent,
            "tokens": asking.tokens,
            "outcomes": dict(asking.outcomes),
            "examples": asking.examples,
            "disturbed": dict(self._disturbed),
            "failures": {name: num_failures(self._folder, name) for name in ENGINES},
            "preemptions": {n: m.get("vllm:num_preemptions_total", 0) for n, m in engines.items()},
            "swapped_mib": {
                n: round(m.get("sola_swapped_bytes_total", 0) / 2**20, 1)
                for n, m in engines.items()
            },
            "planned": {n: m.get("sola_steps_planned_total", 0) for n, m in engines.items()},
            "aside": {n: m.get("aside", 0) for n, m in engines.items()},
            "gateway": {
                name: gateway.get(f"sola_gateway_{name}_total", 0)
                for name in ("continued", "retried", "refused", "given_up")
            },
            "load": round(os.getloadavg()[0], 1),
        }


def _metrics(url: str) -> dict[str, float]:
    """Sums of each metric over its labels, and steps that were not planned by their reason."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found: dict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$", text, re.M):
        found[name] += float(value)
        if name == "sola_steps_unplanned_total" and (
            reason := re.search(r'reason="(\w+)"', labels)
        ):
            found[reason[1]] += float(value)
    return dict(found)


def table(outcome: Mapping[str, Any], idle: Sequence[Row]) -> str:
    """What became of the requests, and what each process held in the pauses without requests."""
    counts = outcome["outcomes"]
    others = sum(n for name, n in counts.items() if name not in verdict.PROPER)
    failures, disturbed = sum(outcome["failures"].values()), sum(outcome["disturbed"].values())
    about = (
        f"{outcome['minutes']:g} minutes, {outcome['num_sent']:,} requests: "
        f"{counts.get(ANSWERED, 0):,} answered in full, {counts.get(REFUSED, 0):,} refused, "
        f"{counts.get(LEFT, 0):,} left by their clients, {others:,} anything else. "
        f"Offered was {OVERLOAD} x the {outcome['served_per_s']:.1f} requests/s that were served "
        f"before. {failures} failures were raised inside the engines, which were paused, reset or "
        f"given other options {disturbed} times. Preempted: "
        f"{sum(outcome['preemptions'].values()):,.0f}; streams that went on at the other engine: "
        f"{outcome['gateway']['continued']:,.0f}."
    )
    looks = [idle[round(part * (len(idle) - 1))] for part in (0, 0.25, 0.5, 0.75, 1)]
    lines = []
    for process in idle[-1]["processes"]:
        five = [look["processes"][process] for look in looks]
        every = [look["processes"][process] for look in idle]
        lines.append([
            process,
            *(f"{each['memory_kib'] / _MIB:,.1f}" for each in five),
            *(_range([each[name] for each in every]) for name in ("threads", "files", "tasks")),
            " / ".join(f"{sum(each['tables'].values()):,}" for each in five[::2]),
        ])  # fmt: skip
    head = (
        "process", *(f"MiB after {look['at_s'] / 60:.1f} min" for look in looks),
        "threads", "files", "tasks", "entries of our tables: first, middle, last pause",
    )  # fmt: skip
    return f"{about}\n\n{markdown(head, lines)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
