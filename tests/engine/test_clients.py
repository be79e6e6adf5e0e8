"""Load generators that people use, against the real server: do their figures equal its own?

Those that are not installed are skipped; each may be in an environment of its own whose `bin` is on
the PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from eventually import eventually
from http_server import Server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_REQUESTS, OUTPUT_TOKENS = 20, 16
OPTIONS = {
    "ttft_s": 100.0,
    "tpot_s": 10.0,
    "classes": {"by-body": {"ttft_s": 50.0}, "by-header": {"ttft_s": 60.0}},
}


@dataclass(frozen=True)
class Figures:
    """Of one run: requests, output tokens, and mean times in seconds."""

    num_requests: float
    output_tokens: float
    ttft_s: float
    tpot_s: float


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    reads_headers = ("--middleware", "sola_sched.serving.slo_middleware.SloHeaders")
    folder = tmp_path_factory.mktemp("server")
    # Each token has text: clients time events with text, and some count its tokens themselves.
    with serving(folder, OPTIONS, *reads_headers, vocab_size=259) as server:
        for _ in range(6):  # until step times are known
            assert server.complete(None)[0] == 200
        yield server


def sums(server: Server, slo_class: str) -> dict[str, float]:
    """Of the server's metrics with this class, by name."""
    found: dict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(
        r"^(\w+)\{(.*)\} (\S+)$", server.ask("/metrics").text, re.M
    ):
        if f'slo_class="{slo_class}"' in labels:
            found[name] += float(value)
    return found


def own_figures(before: dict[str, float], after: dict[str, float]) -> Figures:
    """What has been added to the metrics."""
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}
    ttft_s, tpot_s = (
        new[f"{name}_sum"] / new[f"{name}_count"]
        for name in ("sola_ttft_seconds", "sola_tpot_seconds")
    )
    return Figures(new["sola_requests_total"], new["tokens"], ttft_s, tpot_s)


def vllm_bench(server: Server, folder: Path, body: dict[str, Any], header: str) -> Figures:
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", "tiny", "--tokenizer", str(server.model_dir), "--dataset-name", "random"),
        *("--random-input-len", "40", "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--ignore-eos"),
        *("--temperature", "0", "--disable-tqdm", "--num-warmups", "0"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "out.json"),
        *(("--extra-body", json.dumps(body)) if body else ()),
        *(("--header", header.replace(": ", "=")) if header else ()),
    ]
    run(command)
    found = json.loads((folder / "out.json").read_text())
    return Figures(
        found["completed"], found["total_output_tokens"], found["mean_ttft_ms"] / 1e3,
        found["mean_tpot_ms"] / 1e3,
    )  # fmt: skip


def guidellm(server: Server, folder: Path, body: dict[str, Any], header: str) -> Figures:
    name, _, value = header.partition(": ")
    backend = {
        "kind": "openai_http", "target": server.url, "model": "tiny", "http2": False,
        "request_format": "/v1/completions",
        "extras": {"body": body} if body else {"headers": {name: value}},
    }  # fmt: skip
    tokenizer = {"kind": "huggingface_auto", "model": str(server.model_dir)}
    run([
        *("guidellm", "run", "--backend", json.dumps(backend), "--disable-console"),
        *("--profile", "kind=concurrent,streams=4", "--tokenizer", json.dumps(tokenizer)),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={folder / 'out.json'}"),
    ])  # fmt: skip
    metrics = json.loads((folder / "out.json").read_text())["benchmarks"][0]["metrics"]
    found = {name: metrics[name]["successful"] for name in (
        "time_to_first_token_ms", "inter_token_latency_ms", "output_token_count"
    )}  # fmt: skip
    return Figures(
        metrics["request_totals"]["successful"], found["output_token_count"]["total_sum"],
        found["time_to_first_token_ms"]["mean"] / 1e3,
        found["inter_token_latency_ms"]["mean"] / 1e3,
    )  # fmt: skip


def inference_perf(server: Server, folder: Path, body: dict[str, Any], header: str) -> Figures:
    if body:
        pytest.skip("it can send headers, and no keys of its user's in the body")
    name, _, value = header.partition(": ")
    lengths = {"std_dev": 0, "total_count": NUM_REQUESTS + 5}
    config = {
        "api": {"type": "completion", "streaming": True, "headers": {name: value}},
        "data": {
            "type": "random",
            "input_distribution": {"min": 40, "max": 40, "mean": 40, **lengths},
            "output_distribution": dict.fromkeys(("min", "max", "mean"), OUTPUT_TOKENS) | lengths,
        },
        "load": {
            "type": "constant", "num_workers": 1,
            "stages": [{"rate": 4, "duration": NUM_REQUESTS // 4}],
        },
        "server": {
            "type": "vllm", "model_name": "tiny", "base_url": server.url, "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(server.model_dir)},
        "storage": {"local_storage": {"path": str(folder / "out")}},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML too
    run(["inference-perf", "--config_file", str(folder / "config.yaml")])
    found = json.loads((folder / "out" / "summary_lifecycle_metrics.json").read_text())["successes"]
    tokens = found["output_tokens"]["mean"]
    latency_s, ttft_s = (
        found["latency"][name]["mean"] for name in ("request_latency", "time_to_first_token")
    )
    # Its own TPOT divides by the tokens that it finds in the text, which here are twice as many.
    return Figures(
        found["count"], found["count"] * tokens, ttft_s, (latency_s - ttft_s) / (tokens - 1)
    )


def aiperf(server: Server, folder: Path, body: dict[str, Any], header: str) -> Figures:
    """Without a connection to a hub: with the variable for that it takes a path for a name."""
    run([
        *("aiperf", "profile", "--model", "tiny", "--tokenizer", str(server.model_dir)),
        *("--url", server.url, "--endpoint-type", "completions", "--streaming"),
        *("--isl", "40", "--osl", str(OUTPUT_TOKENS), "--concurrency", "4"),
        *("--request-count", str(NUM_REQUESTS), "--use-server-token-count"),
        *("--extra-inputs", json.dumps({"ignore_eos": True, "temperature": 0} | body)),
        *(("--header", header.replace(": ", ":")) if header else ()),
        *("--artifact-dir", str(folder), "--ui-type", "none", "--no-server-metrics"),
    ], without=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))  # fmt: skip
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Figures(
        found["request_count"]["avg"], found["total_output_tokens"]["avg"],
        found["time_to_first_token"]["avg"] / 1e3, found["inter_token_latency"]["avg"] / 1e3,
    )  # fmt: skip


def run(command: list[str], without: Collection[str] = ()) -> None:
    """Run it, without some variables of the environment."""
    env = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


CLIENTS: dict[str, tuple[str, Callable[..., Figures]]] = {
    "vllm bench serve": ("", vllm_bench),
    "guidellm": ("guidellm", guidellm),
    "inference-perf": ("inference-perf", inference_perf),
    "aiperf": ("aiperf", aiperf),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("way", ["body", "header"])
def test_its_figures_equal_the_servers_and_targets_come_through(
    name: str, way: str, server: Server, tmp_path: Path
) -> None:
    program, client = CLIENTS[name]
    if program and shutil.which(program) is None:
        pytest.skip(f"{program} is not on the PATH")
    slo_class = f"by-{way}"
    body = {"vllm_xargs": {"slo_class": slo_class}} if way == "body" else {}
    header = "" if body else f"x-gateway-inference-objective: {slo_class}"
    before = sums(server, slo_class)
    tokens = num_tokens(server)

    theirs = client(server, tmp_path, body, header)

    def ended() -> dict[str, float] | None:
        now = sums(server, slo_class)
        num = now["sola_requests_total"] - before["sola_requests_total"]
        return now if num >= theirs.num_requests else None

    after = eventually(ended)
    assert after, "the class has not come through"
    ours = own_figures(before, after | {"tokens": num_tokens(server) - tokens})
    print(f"\n{name}, {way}: theirs {theirs}\n ours {ours}")
    assert theirs.num_requests == ours.num_requests >= NUM_REQUESTS // 2
    assert theirs.output_tokens == ours.output_tokens
    assert ours.ttft_s - 1e-3 <= theirs.ttft_s < ours.ttft_s + 0.5
    assert theirs.tpot_s == pytest.approx(ours.tpot_s, rel=0.5, abs=5e-3)


def num_tokens(server: Server) -> float:
    found = re.findall(
        r"^vllm:generation_tokens_total\{.*\} (\S+)$", server.ask("/metrics").text, re.M
    )
    return sum(map(float, found))
