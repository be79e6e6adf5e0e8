"""One real server past saturation, in vLLM's own order and then planned, as its operator sees it.

Prometheus scrapes it, every panel of the dashboard is asked for its data, and the view of `top` is
kept at the end of either part. No Grafana is run: the panels are drawn from the same queries.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from gateway.clients import get_json, wait_for
from gateway.servers import free_port
from harness.command import RESULTS, ROOT
from harness.files import replace_text
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from serving.process import TEXT_IDS
from serving.served import Served

Row = dict[str, Any]
_PARTS = ("vLLM's own order", "planned")
_SLOTS = 8
#: Clients that find out what the server sustains; offered is so much more.
_PROBES, _PROBE_S, _OVERLOAD = 16, 20.0, 1.3
#: Prompt and output tokens by class, and of ten requests so many.
_KINDS = {"chat": (60, 40, 8), "report": (300, 120, 2)}
#: Targets of the first token by class, in times of what a request of a chat takes when none waits.
_TTFT = {"chat": 2.0, "report": 10.0}
_TPOT = 4.0
#: Clients leave after so many seconds.
_PATIENCE_S = 40.0
#: Seconds that a step takes more than the model needs: a busy machine adds little to them.
_SLOWER_S = 0.05
_WINDOW, _STEP_S = "15s", 2
_SCRAPE = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def overload(setup: Setup) -> Outcome:
    """A row for each series of the dashboard.

    Raises:
        SystemExit: Prometheus is not installed.
    """
    rows = setup.last_run(_measured(setup))
    return Outcome(rows, table(rows))


def _measured(setup: Setup) -> Iterator[Row]:
    if shutil.which("prometheus") is None:
        raise SystemExit("error: `prometheus` must be on the PATH (it is not); install it.")
    pictures = ROOT / "docs" if setup.path.parent == RESULTS else setup.path.parent
    with tempfile.TemporaryDirectory() as folder:
        yield from asyncio.run(_run(Path(folder), 30.0 * setup.options["minutes"], pictures))


async def _run(folder: Path, part_s: float, pictures: Path) -> list[Row]:
    from sola_sched.bench.backends.model import TINY_SHAPE, write_model

    options = folder / "options.json"
    options.write_text('{"steer": false}')
    sola = {"options_file": str(options), "classes": {name: {} for name in _KINDS}}
    arguments = {
        "max_num_seqs": _SLOTS, "max_num_batched_tokens": 512, "served_model_name": "tiny",
        "enforce_eager": True, "load_format": "dummy",
        "scheduler_cls": "gateway.slow_scheduler.SlowScheduler",
        "additional_config": {"sola_sched": sola}, "enable_prefix_caching": False,
    }  # fmt: skip
    taken = folder / "taken"
    taken.mkdir()
    slow = {"SLOW_STEPS": str(_SLOWER_S), "SLOW_STEPS_TAKEN": str(taken)}
    with Served(write_model(folder / "model", TINY_SHAPE), arguments, slow) as server:
        server.wait()
        patience = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=patience, connector=connections) as session:
            traffic = _Traffic(session, server.url)
            rate, alone_s = await traffic.sustained()
            options_of = {"classes": _classes(alone_s)}
            replace_text(options, json.dumps(options_of | {"steer": False}))
            async with _prometheus(folder, server.url) as url, traffic.offered(_OVERLOAD * rate):
                began_s = time.time()
                await asyncio.sleep(part_s)
                await _picture(server.url, pictures / "top-before.svg")
                replace_text(options, json.dumps(options_of))
                switched_s = time.time()
                await asyncio.sleep(part_s)
                await _picture(server.url, pictures / "top-after.svg")
                found = await asyncio.to_thread(_series, url, began_s, time.time())
    run = {
        "run": round(began_s),
        "rate": round(_OVERLOAD * rate, 2),
        "switched_s": round(switched_s - began_s, 1),
        **options_of,
    }
    return [run | series for series in found]


def _classes(alone_s: float) -> dict[str, dict[str, float]]:
    outputs = _KINDS["chat"][1]
    return {
        name: {"ttft_s": round(times * alone_s, 2), "tpot_s": round(_TPOT * alone_s / outputs, 3)}
        for name, times in _TTFT.items()
    }


class _Traffic:
    """Clients of a server; what they ask for comes from one seed."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._rng = random.Random(0)

    async def sustained(self) -> tuple[float, float]:
        """Requests a second with all slots in use, and seconds that a chat takes by itself."""
        for _ in range(12):  # step times are learned, code is compiled
            await self._ask("chat")
        began_s = time.monotonic()
        for _ in range(5):
            await self._ask("chat")
        alone_s = (time.monotonic() - began_s) / 5
        end_s = time.monotonic() + _PROBE_S
        num_ended = sum(await asyncio.gather(*(self._until(end_s) for _ in range(_PROBES))))
        return num_ended / _PROBE_S, alone_s

    async def _until(self, end_s: float) -> int:
        num_ended = 0
        while time.monotonic() < end_s:
            await self._ask(self._kind())
            num_ended += 1
        return num_ended

    @asynccontextmanager
    async def offered(self, rate: float) -> AsyncIterator[None]:
        """Poisson arrivals at this rate until the block ends."""
        tasks: set[asyncio.Task[None]] = set()

        async def arrive() -> None:
            while True:
                await asyncio.sleep(self._rng.expovariate(rate))
                tasks.add(asyncio.create_task(self._ask(self._kind())))

        arriving = asyncio.create_task(arrive())
        try:
            yield
        finally:
            for task in (arriving, *tasks):
                task.cancel()
            await asyncio.gather(arriving, *tasks, return_exceptions=True)

    def _kind(self) -> str:
        return self._rng.choices(list(_KINDS), [kind[2] for kind in _KINDS.values()])[0]

    async def _ask(self, kind: str) -> None:
        num_prompt, num_output, _ = _KINDS[kind]
        body = {
            "model": "tiny", "prompt": self._rng.choices(TEXT_IDS, k=num_prompt),
            "max_tokens": num_output, "ignore_eos": True, "vllm_xargs": {"slo_class": kind},
        }  # fmt: skip
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()


@asynccontextmanager
async def _prometheus(folder: Path, server_url: str) -> AsyncIterator[str]:
    target = server_url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(_SCRAPE.format(target=target))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
               f"--web.listen-address={url.removeprefix('http://')}"]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            await asyncio.to_thread(wait_for, lambda: get_json(f"{url}/api/v1/targets"))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def panels() -> Iterator[tuple[str, str, str, str]]:
    """Title, unit, legend and query of each series of the dashboard."""
    page = json.loads((ROOT / "examples" / "monitoring" / "dashboard.json").read_text("utf-8"))
    for panel in page["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$model", ".*").replace("$__rate_interval", _WINDOW)
            unit = panel["fieldConfig"]["defaults"]["unit"]
            yield panel["title"], unit, target["legendFormat"], query


def _series(url: str, began_s: float, end_s: float) -> list[Row]:
    rows = []
    for title, unit, legend, query in panels():
        asked = {"query": query, "start": began_s, "end": end_s, "step": _STEP_S}
        answer = get_json(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        for found in answer["data"]["result"]:
            rows.append(
                {
                    "panel": title,
                    "unit": unit,
                    "series": series_name(legend, found["metric"]),
                    "at_s": [round(at - began_s) for at, _ in found["values"]],
                    "values": [_short(value) for _, value in found["values"]],
                }
            )
    return rows


def series_name(legend: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def _short(value: str) -> float | None:
    number = float(f"{float(value):.4g}")
    return number if abs(number) < float("inf") else None


async def _picture(url: str, path: Path) -> None:
    """What `python -m sola_sched.top` shows."""
    from sola_sched.top.metrics import fetch
    from sola_sched.top.screen import Top

    app = Top([url], 2.0, fetch)
    async with app.run_test(size=(132, 27)) as pilot:
        await asyncio.sleep(15.0)
        await pilot.pause()
        path.write_text(app.export_screenshot(), "utf-8")


def table(rows: Sequence[Row]) -> str:
    """By class: the share in time and the median time to the first token at the end of a part."""
    first = rows[0]
    lines = []
    for name in first["classes"]:
        cells = []
        for end_s in (first["switched_s"], float("inf")):
            shares = _last(rows, "In time", name, end_s)
            times = _last(rows, "Time to first token", f"{name} p50", end_s)
            cells += [f"{100 * shares:.0f}", f"{times:.2f}"]
        lines.append([name, f"{first['classes'][name]['ttft_s']:g}", *cells])
    shown = (f"{part}: {what}" for part in _PARTS for what in ("in time, %", "TTFT p50, s"))
    head = ("class", "TTFT target, s", *shown)
    about = (
        "`vllm serve` with a tiny model on CPU cores that others use too, each step "
        f"{1e3 * _SLOWER_S:.0f} ms longer than it takes; {_SLOTS} slots, "
        f"{first['rate']:g} requests/s, {_OVERLOAD} x what it sustains; "
        f"clients leave after {_PATIENCE_S:.0f} s. "
        f"Planned from {first['switched_s']:.0f} s on. Medians of the last 30 s of either part, of "
        "the requests that ended then."
    )
    return f"{about}\n\n{markdown(head, lines)}"


def _last(rows: Sequence[Row], panel: str, series: str, end_s: float) -> float:
    """Median over the last 30 s before `end_s`; NaN where nothing ended."""
    for row in rows:
        if (row["panel"], row["series"]) == (panel, series):
            end_s = min(end_s, row["at_s"][-1])
            known = [
                value
                for at, value in zip(row["at_s"], row["values"], strict=True)
                if end_s - 30 <= at <= end_s and value is not None
            ]
            return statistics.median(known) if known else float("nan")
    return float("nan")
