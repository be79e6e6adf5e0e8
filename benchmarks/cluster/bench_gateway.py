"""Two unequal CPU replicas on Ray Serve behind the gateway: routers, cost per token, a kill.

    python benchmarks/cluster/bench_gateway.py --num-prompts 150 --request-rate 6 --rounds 2

Four parts, in one run on the same engines: the routers in turn, each with requests of
`vllm bench serve` at the same arrival times; the processor time of the gateway per token, beside
one engine asked directly; and requests through Ray's gateway during which one replica is killed.
`--parts kill` runs the last alone (`make cluster`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PARTS = ("routers", "cost", "kill")
_HERE = Path(__file__).resolve().parent
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_START_S = 400.0
_GATEWAY_PORT = 8123


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--routers", nargs="+", default=["power-of-two", "least-ttft", "packing"])
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--request-rate", type=float, default=6.0)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--slow-step-ms", type=float, default=30.0, help="of the slower replica")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON lines, one for each run")
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of both engines."""
    return {
        "served_model_name": "tiny",
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,
        "scheduler_cls": "slow_scheduler.SlowScheduler",
        "additional_config": {
            "sola_sched": {
                "ttft_s": args.ttft_ms / 1e3,
                "tpot_s": args.tpot_ms / 1e3,
                "load_interval_s": 0.1,
            }
        },
    }


@contextmanager
def cluster(args: argparse.Namespace, model_dir: Path) -> Iterator[str]:
    """Ray with two engines and the gateway; yields the gateway's URL."""
    import ray
    from ray import serve

    from sola_sched.serving.ray_app import build

    def environment(slow_ms: float) -> dict[str, str]:
        return {**_QUIET, "SLOW_STEP_S": str(slow_ms / 1e3), "PYTHONPATH": str(_HERE)}

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
        logging_level="warning", log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled")
        app = build(
            {
                "model": str(model_dir),
                "options": engine_options(args),
                "engines": [{"env": environment(0.0)}, {"env": environment(args.slow_step_ms)}],
                "host": "127.0.0.1",
                "port": _GATEWAY_PORT,
                "router": args.routers[-1],
                "gateway": {"stall_s": 30.0},
            }
        )
        serve.run(app, name="sola", route_prefix=None)
        url = f"http://127.0.0.1:{_GATEWAY_PORT}"
        wait_for(lambda: sum(r["is_usable"] for r in get_json(f"{url}/replicas")) == 2)
        yield url
    finally:
        serve.shutdown()
        ray.shutdown()


def get_json(url: str) -> Any:
    """The answer to a GET."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def wait_for(condition: Any, limit_s: float = _START_S) -> None:
    """Wait until `condition` is true; errors of a connection are not."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"nothing was ready within {limit_s:g} s")


@contextmanager
def gateway(router: str, urls: Sequence[str], port: int) -> Iterator[tuple[str, int]]:
    """A gateway of its own before the engines; yields its URL and process id."""
    command = [
        *(sys.executable, "-P", "-m", "sola_sched.serving", "gateway"),
        *("--router", router, "--port", str(port), "--stall-s", "30"),
        *(part for url in urls for part in ("--replica", url)),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(
                lambda: sum(bool(r["has_feed"]) for r in get_json(f"{url}/replicas")) == len(urls)
            )
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)


def vllm_bench(args: argparse.Namespace, url: str, model_dir: Path, **changes: Any) -> Any:
    """Start `vllm bench serve`; yields what `finish` waits for."""
    options = {
        "request_rate": args.request_rate,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
        **changes,
    }
    folder = Path(tempfile.mkdtemp(prefix="bench-gateway-"))
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", "tiny", "--tokenizer", str(model_dir), "--dataset-name", "random"),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--random-range-ratio", "0.3", "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", "result.json", "--disable-tqdm"),
        *(
            part
            for name, value in options.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ),
    ]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **_QUIET}
    )
    return process, folder


def finish(started: Any) -> dict[str, Any]:
    """The result file of a started `vllm bench serve`."""
    process, folder = started
    if process.wait() != 0:
        raise RuntimeError(f"vllm bench serve failed:\n{(folder / 'log').read_text()[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def summary(result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Attainment and rates of one run."""
    attained = 0
    for ttft, itls, error in zip(result["ttfts"], result["itls"], result["errors"], strict=True):
        tpot = sum(itls) / len(itls) if itls else 0.0
        attained += not error and ttft <= args.ttft_ms / 1e3 and tpot <= args.tpot_ms / 1e3
    return {
        "attained": attained / len(result["ttfts"]),
        "completed": result["completed"],
        "failed": result["failed"],
        "tokens_per_s": round(result["output_throughput"], 1),
        "median_ttft_ms": round(result["median_ttft_ms"], 1),
        "p99_ttft_ms": round(result["p99_ttft_ms"], 1),
        "median_tpot_ms": round(result["median_tpot_ms"], 2),
    }


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare_routers(args: argparse.Namespace, urls: list[str], model_dir: Path) -> list[dict]:
    """Each router in turn, as often as there are rounds, at the same arrival times."""
    rows = []
    for round_number in range(args.rounds):
        for router in args.routers:
            with gateway(router, urls, _GATEWAY_PORT + 1) as (url, pid):
                before_s = cpu_s(pid)
                result = finish(vllm_bench(args, url, model_dir, seed=args.seed + round_number))
                gateway_ms = 1e3 * (cpu_s(pid) - before_s) / result["total_output_tokens"]
            row = {"part": "routers", "round": round_number, "router": router}
            rows.append(row | summary(result, args) | {"gateway_ms_per_token": gateway_ms})
            print_row(rows[-1], args)
    return rows


def measure_cost(args: argparse.Namespace, urls: list[str], model_dir: Path) -> list[dict]:
    """One engine asked directly and through a gateway, in turn, by eight clients at once."""
    rows = []
    closed = {"request_rate": "inf", "max_concurrency": 8}
    with gateway("round-robin", urls[:1], _GATEWAY_PORT + 1) as (through, pid):
        for round_number in range(args.rounds):
            for name, url in (("direct", urls[0]), ("gateway", through)):
                before_s = cpu_s(pid)
                result = finish(vllm_bench(args, url, model_dir, **closed))
                spent_ms = 1e3 * (cpu_s(pid) - before_s) / result["total_output_tokens"]
                row = {"part": "cost", "round": round_number, "path": name}
                row |= summary(result, args)
                rows.append(row | {"gateway_ms_per_token": spent_ms if url == through else 0.0})
                print_row(rows[-1], args)
    return rows


def kill_one(args: argparse.Namespace, url: str, model_dir: Path) -> list[dict]:
    """Requests through Ray's gateway while the process of one replica is killed."""
    import ray

    started = vllm_bench(args, url, model_dir)
    wait_for(lambda: sum(r["num_in_flight"] for r in get_json(f"{url}/replicas")) > 2)
    victim = max(get_json(f"{url}/replicas"), key=lambda r: r["num_in_flight"])
    ray.kill(_actor_of(victim["name"]), no_restart=True)
    result = finish(started)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        counts = {
            line.split()[0].removeprefix("sola_gateway_").removesuffix("_total"): float(
                line.split()[1]
            )
            for line in response.read().decode().splitlines()
            if line.startswith("sola_gateway_") and "_created" not in line
        }
    row = {"part": "kill", "in_flight_at_kill": victim["num_in_flight"]} | summary(result, args)
    row["gateway"] = counts
    print_row(row, args)
    return [row]


def _actor_of(name: str) -> Any:
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if name in actor["name"]:
            return ray.get_actor(actor["name"], namespace=actor["namespace"])
    raise RuntimeError(f"no actor of the replica {name}")


def print_row(row: dict[str, Any], args: argparse.Namespace) -> None:
    """Show a row, and keep it where asked."""
    print(json.dumps(row), flush=True)
    if args.output is not None:
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if a request was lost in the last one."""
    args = make_parser().parse_args(argv)
    os.environ |= _QUIET
    sys.path.append(str(_HERE))  # for Ray's workers: they get the driver's
    from sola_sched.bench.backends.model import TINY_SHAPE, write_model

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_dir = write_model(folder / "tiny", TINY_SHAPE)
        url = stack.enter_context(cluster(args, model_dir))
        urls = [replica["url"] for replica in get_json(f"{url}/replicas")]
        if "routers" in args.parts:
            rows += compare_routers(args, urls, model_dir)
        if "cost" in args.parts:
            rows += measure_cost(args, urls, model_dir)
        if "kill" in args.parts:
            rows += kill_one(args, url, model_dir)
    lost = [row for row in rows if row["part"] == "kill" and row["failed"]]
    print("nothing lost" if not lost else f"lost: {lost[0]['failed']} requests")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
