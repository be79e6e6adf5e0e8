"""Two unequal CPU replicas on Ray Serve: ways to them in turn, one killed, and cost per token.

Three parts, `--only` names some:

- `ways`: what both replicas bear, with as many clients as they have slots; then requests of `vllm
  bench serve` at the same arrival times through Serve's own proxy with Ray's power of two and with
  our router in it, and through the gateway with either rule, in one order and back;
- `kill`: the replica with more requests is killed while they run, at half the rate;
- `cost`: one plain `vllm serve` asked directly and through a gateway by eight clients at once.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gateway import servers
from gateway.clients import QUIET, Bench, Traffic, cpu_s, get_json, wait_for
from harness.markdown import markdown
from harness.setup import Outcome, Setup

PARTS = ("ways", "kill", "cost")
#: Name in the table to router of the gateway, or header for the router in Serve's proxy.
WAYS = {
    "Serve's proxy, Ray's power of two": ("", "ray"),
    "Serve's proxy, our least-ttft": ("", "ours"),
    "gateway, power-of-two": ("power-of-two", ""),
    "gateway, least-ttft": ("least-ttft", ""),
}
BORNE = "gateway, a client for each slot"
_NUM_BORNE = 80
#: Of what the replicas bear, where no rate is given.
_LOAD = 0.85
_NUM_CLIENTS = 8
_COST_REQUESTS = 100
Row = dict[str, Any]


def gateway(setup: Setup) -> Outcome:
    """Run the parts and keep their rows; the table is made of the last rows of each part.

    Raises:
        ConfigError: A part is not known.
        SystemExit: A request was lost.
    """
    setup.check_only(PARTS)
    rows = setup.all_rows() if setup.is_stored else list(setup.keep(_loaded(_measured(setup))))
    latest = _latest(rows)
    lost = sum(row["failed"] for row in latest)
    if lost:
        raise SystemExit(f"error: {lost} requests were lost.")
    return Outcome(latest, table(latest))


def _loaded(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows with the machine's mean load over the minute before."""
    for row in rows:
        yield row | {"load": round(os.getloadavg()[0], 1)}


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Of each part the rows of its last run."""
    last = {row["part"]: row["run"] for row in rows}
    return [row for row in rows if row["run"] == last[row["part"]]]


def _measured(setup: Setup) -> Iterator[Row]:
    parts = setup.only or PARTS
    os.environ |= QUIET
    from sola_sched.bench.backends.model import TINY_SHAPE, write_model

    traffic, run = Traffic(), int(time.time())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_dir = write_model(folder / "tiny", TINY_SHAPE)
        if "cost" in parts:
            for row in _cost(setup, model_dir, traffic):
                yield {"run": run, "part": "cost"} | row
        if {"ways", "kill"} & set(parts):
            there = stack.enter_context(servers.cluster(model_dir, traffic))
            row = _borne(there, model_dir, traffic)
            yield {"run": run, "part": "capacity"} | row
            per_request = row["output_tokens"] / row["num_requests"]
            rate = setup.options["request_rate"] or round(
                _LOAD * row["tokens_per_s"] / per_request, 1
            )
            if "ways" in parts:
                for row in _ways(setup, there, model_dir, traffic, rate):
                    yield {"run": run, "part": "ways"} | row
            if "kill" in parts:
                row = _kill(setup, there, model_dir, traffic, rate / 2)
                yield {"run": run, "part": "kill"} | row


def _borne(there: servers.Cluster, model_dir: Path, traffic: Traffic) -> Row:
    """What the replicas bear."""
    url = there.gateway_url
    Bench(url, model_dir, traffic, num_prompts=20, request_rate="inf").finish()  # warm
    num_slots = len(there.urls) * servers.MAX_NUM_SEQS
    bench = Bench(
        url, model_dir, traffic, num_prompts=_NUM_BORNE, request_rate="inf",
        max_concurrency=num_slots,
    )  # fmt: skip
    return {"way": BORNE, "seed": 0, "request_rate": None} | bench.finish()


def _ways(
    setup: Setup, there: servers.Cluster, model_dir: Path, traffic: Traffic, rate: float
) -> Iterator[Row]:
    """Each way in turn, a round for each seed, every second one back."""
    for number, seed in enumerate(setup.seeds):
        ways = list(WAYS.items())
        for way, (router, header) in ways if number % 2 == 0 else reversed(ways):
            with ExitStack() as stack:
                url, between = there.proxy_url, there.proxies
                if router:
                    url, pid = stack.enter_context(servers.gateway(router, there.urls))
                    between = (pid,)
                more = {"header": f"x-bench-router={header}"} if header else {}
                before_s = [cpu_s(between), cpu_s(there.fronts)]
                bench = Bench(
                    url, model_dir, traffic, num_prompts=setup.num_requests, request_rate=rate,
                    seed=seed, **more,
                )  # fmt: skip
                row = bench.finish()
                spent_s = [cpu_s(between) - before_s[0], cpu_s(there.fronts) - before_s[1]]
            between_ms, front_ms = (1e3 * each / row["output_tokens"] for each in spent_s)
            yield (
                {"way": way, "seed": seed, "request_rate": rate}
                | row
                | {
                    "between_ms_per_token": round(between_ms, 3),
                    "front_ms_per_token": round(front_ms, 3),
                }
            )


def _kill(
    setup: Setup, there: servers.Cluster, model_dir: Path, traffic: Traffic, rate: float
) -> Row:
    """The way is Ray's gateway; the replica dies after a fifth of all rounds' requests."""
    url = there.gateway_url
    num_requests = setup.num_requests * len(setup.seeds)
    bench = Bench(
        url, model_dir, traffic, num_prompts=num_requests, request_rate=rate, seed=setup.seeds[0]
    )
    wait_for(lambda: _counts(there.admin_url)["requests"] > num_requests / 5)
    wait_for(lambda: max(r["num_in_flight"] for r in get_json(f"{there.admin_url}/replicas")) > 1)
    victim = max(
        get_json(f"{there.admin_url}/replicas"), key=lambda replica: replica["num_in_flight"]
    )
    there.kill(victim["name"])
    return {
        "way": "Ray's gateway, one replica killed",
        "seed": setup.seeds[0],
        "request_rate": rate,
        "in_flight_at_kill": victim["num_in_flight"],
        **bench.finish(),
        "counts": _counts(there.admin_url),
    }


def _counts(url: str) -> dict[str, float]:
    """What a gateway counts."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r"^sola_gateway_(\w+?)(?:_total)? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _cost(setup: Setup, model_dir: Path, traffic: Traffic) -> Iterator[Row]:
    """The same engine asked directly and through a gateway, in turn."""
    closed = {"request_rate": "inf", "max_concurrency": _NUM_CLIENTS}
    num_requests = min(setup.num_requests, _COST_REQUESTS)
    with (
        servers.plain_server(model_dir, traffic) as (direct, front),
        servers.gateway("round-robin", [direct]) as (through, between),
    ):
        Bench(direct, model_dir, traffic, num_prompts=20, **closed).finish()  # warm
        for seed in setup.seeds:
            for way, url in (("vllm serve", direct), ("gateway before it", through)):
                before_s = [cpu_s([between]), cpu_s([front])]
                row = Bench(
                    url, model_dir, traffic, num_prompts=num_requests, seed=seed, **closed
                ).finish()
                spent_s = [cpu_s([between]) - before_s[0], cpu_s([front]) - before_s[1]]
                between_ms, front_ms = (1e3 * each / row["output_tokens"] for each in spent_s)
                yield (
                    {"way": way, "seed": seed}
                    | row
                    | {
                        "between_ms_per_token": round(between_ms, 3) if url == through else 0.0,
                        "front_ms_per_token": round(front_ms, 3),
                    }
                )


def table(rows: Sequence[Row]) -> str:
    """A line for each way: attainment of all rounds together, else means over rounds."""
    head = (
        "way", "req/s", "requests", "both targets met", "median TTFT", "P99 TTFT", "median TPOT",
        "tokens/s", "between, ms a token", "front, ms a token",
    )  # fmt: skip
    lines = []
    order = (BORNE, *WAYS)
    ways = dict.fromkeys(row["way"] for row in rows)
    for way in [way for way in order if way in ways] + [way for way in ways if way not in order]:
        own = [row for row in rows if row["way"] == way]

        def mean(name: str, own: Sequence[Row] = own) -> float:
            return float(sum(row[name] for row in own)) / len(own)

        num_requests = sum(row["num_requests"] for row in own)
        attained = sum(row["attained"] for row in own) / num_requests
        spent = ["", ""]
        if "between_ms_per_token" in own[0]:
            spent = [f"{mean(f'{name}_ms_per_token'):.2f}" for name in ("between", "front")]
        lines.append(
            [
                way, str(own[0].get("request_rate") or ""), f"{num_requests:,}",
                f"{attained:.1%}", f"{mean('median_ttft_ms'):,.0f} ms",
                f"{mean('p99_ttft_ms'):,.0f} ms", f"{mean('median_tpot_ms'):.1f} ms",
                f"{mean('tokens_per_s'):.0f}", *spent,
            ]
        )  # fmt: skip
    text = markdown(head, lines)
    loads = [row["load"] for row in rows if "load" in row]
    if loads:
        text += (
            f"\n\nLoad average of the machine, with these processes: {min(loads):.1f} to "
            f"{max(loads):.1f} on {os.cpu_count()} cores."
        )
    killed = [row for row in rows if row["part"] == "kill"]
    if killed:
        counts = killed[0]["counts"]
        text += (
            f"\n\nKilled with {killed[0]['in_flight_at_kill']} requests on it: "
            f"{killed[0]['failed']} lost, {counts['continued']:.0f} streams continued elsewhere, "
            f"{counts['retried']:.0f} requests begun anew, {counts['given_up']:.0f} given up."
        )
    return text
