"""What `explain` says of late requests on the real engine, whose causes are known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm")

from eventually import eventually
from http_server import Answer, Server, serving

from sola_sched.explain import cli as explain

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

OPTIONS = {
    "ttft_s": 100.0,
    "tpot_s": 10.0,
    "classes": {
        "chat": {"ttft_s": 0.2, "tpot_s": 10.0},
        "job": {"ttft_s": 0.2, "tpot_s": 10.0, "weight": 10},
    },
}
#: Room for one request of the longest kind, and a little more.
NUM_BLOCKS, BLOCK_SIZE = 260, 32
LONG = 6000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = '{"max_position_embeddings": 8192}'
    with serving(
        tmp_path_factory.mktemp("server"), OPTIONS,
        *("--hf-overrides", overrides, "--max-model-len", "8192"),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)),
        "--no-enable-prefix-caching",
    ) as server:  # fmt: skip
        for num_prompt in (20, 200, LONG, 20, 2000, 20, 400, LONG):  # until step times are known
            assert ask(server, num_prompt).status == 200
        yield server


def ask(server: Server, num_prompt: int, num_output: int = 4, **xargs: Any) -> Answer:
    """Send a prompt of so many tokens, a letter each, and wait for the whole answer."""
    body = {
        "prompt": "x" * num_prompt,
        "max_tokens": num_output,
        "ignore_eos": True,
        **({"vllm_xargs": xargs} if xargs else {}),
    }
    answer = server.ask("/v1/completions", body)
    assert answer.status == 200, answer
    return answer


def explained(server: Server, answer: Answer, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert eventually(lambda: explain.main([server.url, answer.json["id"]]) == 0)
    return capsys.readouterr().out


def test_a_prompt_that_is_too_long_for_its_target_is_called_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = explained(server, ask(server, LONG, ttft_slo_ms=30), capsys)

    assert "It was late: its first token came" in text
    assert "with a prompt of 6,000 tokens" in text
    assert "even on an idle engine, longer than its TTFT target of 30 ms" in text
    assert "It needs a longer target" in text


def test_a_request_that_found_no_memory_is_told_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, LONG, 1500)
        time.sleep(1.0)
        text = explained(server, ask(server, 3000, slo_class="chat", ttft_slo_ms=500), capsys)
        first.result()

    assert "for KV memory." in text
    assert "for KV memory. More KV memory (`--gpu-memory-utilization`" in text


def test_a_flood_of_another_class_is_called_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Future[Answer]] = []
    with ThreadPoolExecutor(96) as pool:
        for number in range(240):
            jobs.append(pool.submit(ask, server, 400, slo_class="job"))
            if number == 80:
                chat = pool.submit(ask, server, 1000, slo_class="chat")
        text = explained(server, chat.result(), capsys)
        for job in jobs:
            job.result()

    assert "(class chat). It was late" in text
    assert "of class job" in text.splitlines()[2]  # those that waited when it arrived
    assert "were of class job" in text
    assert "TPOT targets" not in text
    assert "`share` for class chat would have protected it" in text
