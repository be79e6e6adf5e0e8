"""The real server - API, engine core and worker processes - with the scheduler selected by flag."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from http_server import Server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = {
    "ttft_s": 0.5,
    "tpot_s": 0.05,
    "classes": {"batch": {"ttft_s": 30.0, "tpot_s": None}, "job": {"e2e_s": 60.0, "weight": 2}},
}
#: `vllm bench serve` without the `vllm` command, which the CPU wheel cannot start.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), OPTIONS) as server:
        yield server


@pytest.mark.parametrize(
    ("xargs", "key", "value", "rule"),
    [
        ({"ttft_slo_ms": -5}, "ttft_slo_ms", "-5", "> 0"),
        ({"ttft_slo_ms": "abc"}, "ttft_slo_ms", "abc", "must be a finite number"),
        ({"tpot_slo_ms": 0}, "tpot_slo_ms", "0", "> 0"),
        ({"slo_class": "nope"}, "slo_class", "nope", "known: batch, job"),
        ({"e2e_slo_ms": 400}, "'e2e_slo_ms'", "got 400 and 500", "at least 'ttft_slo_ms'"),
        ({"slo_class": "job", "ttft_slo_ms": 60001}, "e2e_slo_ms", "60001", "at least"),
        ({"ttft_slo": 500}, "'ttft_slo'", "must be written", "'ttft_slo_ms'"),
        ({"TPOT_SLO_MS": 50}, "'TPOT_SLO_MS'", "must be written", "'tpot_slo_ms'"),
        ({"slo-class": "batch"}, "'slo-class'", "must be written", "'slo_class'"),
    ],
)
def test_invalid_slo_is_refused_by_name_and_the_server_keeps_answering(
    server, xargs, key, value, rule
):
    status, answer = server.complete(xargs)

    message = answer["error"]["message"]
    assert status == 400
    assert all(part in message for part in (key, value, rule)), message
    assert server.complete(None)[0] == 200


@pytest.mark.parametrize("xargs", [{"ttft_slo_ms": -5}, {"slo_class": "chit"}, {"tpot_ms": 50}])
def test_invalid_slo_of_a_stream_is_refused_before_it_starts(server, xargs):
    status, answer = server.complete(xargs, stream=True)

    assert status == 400
    assert next(iter(xargs)) in answer["error"]["message"]
    assert server.complete(None, stream=True)[0] == 200


@pytest.mark.parametrize(
    "xargs",
    [
        {"ttft_slo_ms": 500, "tpot_slo_ms": 50.5},
        {"slo_class": "batch"},
        {"slo_class": "batch", "ttft_slo_ms": 1},
        {"slo_class": "job"},
        {"e2e_slo_ms": 60000, "ttft_slo_ms": "none", "tpot_slo_ms": "none"},
        {"somebody_elses_key": "abc"},
    ],
    ids=str,
)
def test_valid_slo_is_served(server, xargs):
    status, answer = server.complete(xargs)

    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_chat_accepts_and_refuses_the_same_keys(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}

    good, _ = server.post("/v1/chat/completions", body | {"vllm_xargs": {"ttft_slo_ms": 300}})
    bad, answer = server.post("/v1/chat/completions", body | {"vllm_xargs": {"ttft_slo_ms": -1}})

    assert (good, bad) == (200, 400)
    assert "ttft_slo_ms" in answer["error"]["message"]


def test_overload_loses_no_request(server, tmp_path):
    """200 requests in half a second, scarce KV: all of them complete with all their tokens."""
    command = [
        *(sys.executable, "-c", BENCH, "--backend", "openai", "--base-url", server.url),
        *("--endpoint", "/v1/completions", "--model", "tiny"),
        *("--tokenizer", str(server.model_dir), "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "48", "--num-prompts", "200"),
        *("--request-rate", "400", "--seed", "1", "--ignore-eos", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]

    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (200, 0)
    assert result["total_output_tokens"] == 200 * 48
    # Saturated: serving took several times longer than the half second of arrivals.
    assert result["duration"] > 1.5


def test_server_log_names_policy_and_targets(server):
    log = server.log.read_text()

    assert "sola_sched: policy attain, targets by default: TTFT 0.5 s, TPOT 0.05 s" in log
    assert "last token 60 s, weight 2" in log
