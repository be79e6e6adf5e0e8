"""What the real server says of itself: `/metrics`, and HTTP 503 for requests that it refuses."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")

from eventually import eventually
from http_server import Answer, Server, serving

from sola_sched.adaptive_placement import observe
from sola_sched.explain import cli as explain

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = {
    "ttft_s": 100.0,
    "tpot_s": 10.0,
    "overload": "reject",
    "classes": {
        "batch": {"ttft_s": None, "tpot_s": None},
        "agent": {"ttft_s": None, "tpot_s": None, "e2e_s": 100.0},
    },
}
#: Nobody can meet this target, so the request is refused.
HOPELESS = {"ttft_slo_ms": 0.001}
PATHS = ("/v1/completions", "/v1/chat/completions")
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), OPTIONS) as server:
        for _ in range(6):  # until step times are known
            assert server.complete(None)[0] == 200
        yield server


def ask(server: Server, path: str = PATHS[0], **options: Any) -> Answer:
    prompt = (
        {"messages": [{"role": "user", "content": "to be"}]}
        if "chat" in path
        else {"prompt": "to be"}
    )
    return server.ask(path, {"max_tokens": 5, "ignore_eos": True, **prompt, **options})


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """One request decodes all the time: on an idle engine even hopeless ones are served."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            answer = ask(server, max_tokens=400, vllm_xargs={"slo_class": "batch"})
            assert answer.status == 200

    def running() -> float:
        found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics(server), re.M)
        return float(found[1]) if found else 0.0

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work) for _ in range(2)]
        try:
            eventually(lambda: running() == 2)
            yield
        finally:
            stop.set()
        for worker in workers:
            worker.result()


def metrics(server: Server) -> str:
    return server.ask("/metrics").text


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values of our metrics by name and labels, without the two labels that all share."""
    found = {}
    for name, labels, value in _SAMPLE.findall(metrics(server)):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if name.startswith("sola_") and not name.endswith("_created"):
            assert (pairs.pop("engine"), pairs.pop("model_name")) == ("0", "tiny")
            found[name, frozenset(pairs.items())] = float(value)
    return found


def ends(server: Server) -> dict[tuple[str, str], int]:
    """Ends of requests by class and outcome."""
    return {
        (dict(labels)["slo_class"], dict(labels)["outcome"]): int(value)
        for (name, labels), value in samples(server).items()
        if name == "sola_requests_total"
    }


def new_ends(
    server: Server, before: dict[tuple[str, str], int], count: int
) -> dict[tuple[str, str], int]:
    """Ends since `before`, once there are so many: reports take a moment."""
    limit = time.monotonic() + 30
    while True:
        new = {key: n - before.get(key, 0) for key, n in ends(server).items()}
        if sum(new.values()) >= count or time.monotonic() > limit:
            return {key: n for key, n in new.items() if n}
        time.sleep(0.1)


def test_requests_are_counted_by_class_and_outcome(server: Server) -> None:
    before = ends(server)
    for slo_class in ("default", "batch"):
        for outcome in ("attained", "missed", "rejected", "aborted"):
            assert (slo_class, outcome) in before

    for _ in range(3):
        assert ask(server, vllm_xargs={"slo_class": "batch"}).status == 200
    for _ in range(2):
        assert ask(server).status == 200
    assert ask(server, vllm_xargs={"tpot_slo_ms": 1e-3}).status == 200

    assert new_ends(server, before, 6) == {
        ("batch", "attained"): 3,
        ("default", "attained"): 2,
        ("default", "missed"): 1,
    }


def test_a_deadline_for_the_whole_answer_is_met_or_the_request_refused(server: Server) -> None:
    before = ends(server)
    for deadline in ({"slo_class": "agent"}, {"slo_class": "batch", "e2e_slo_ms": 100_000}):
        assert ask(server, vllm_xargs=deadline).status == 200
    # Its first token could be in time, the last of so many could not.
    hopeless = ask(server, max_tokens=300, vllm_xargs={"slo_class": "agent", "e2e_slo_ms": 50})
    assert hopeless.status == 503
    assert "last token 0.05 s" in hopeless.text

    assert new_ends(server, before, 3) == {
        ("agent", "attained"): 1,
        ("agent", "rejected"): 1,
        ("batch", "attained"): 1,
    }


def test_steps_planner_time_and_errors_are_there(server: Server) -> None:
    found = samples(server)
    values = {name: value for (name, labels), value in found.items() if not labels}

    assert values["sola_steps_planned_total"] > 0
    assert found["sola_steps_unplanned_total", frozenset({("reason", "learning")})] > 0
    assert values["sola_planner_seconds_count"] == values["sola_steps_planned_total"]
    assert values["sola_planner_seconds_sum"] > 0
    assert values["sola_step_model_error"] > 0
    assert (values["sola_requests_held"], values["sola_requests_lost"]) == (0, 0)
    for direction in ("out", "in"):
        assert found["sola_swapped_bytes_total", frozenset({("direction", direction)})] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_refused_request_gets_503_and_when_to_come_back(
    server: Server, path: str, stream: bool
) -> None:
    before = ends(server)
    with busy(server):
        answer = ask(server, path, stream=stream, vllm_xargs=HOPELESS)
        served = ask(server, path, stream=stream)

    assert answer.status == 503, answer
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"] == "application/json"
    error = answer.json["error"]
    assert error["code"] == 503
    assert error["message"].startswith(
        "the request could not have met its targets (TTFT 1e-06 s, TPOT 10 s)"
    )
    assert "try again in " in error["message"]
    assert served.status == 200
    assert "error" not in served.json
    assert "Retry-After" not in served.headers
    assert new_ends(server, before, 2)["default", "rejected"] == 1


def test_refusals_leave_no_errors_in_the_log(server: Server) -> None:
    with busy(server):
        for path in PATHS:
            for stream in (False, True):
                assert ask(server, path, stream=stream, vllm_xargs=HOPELESS).status == 503

    log = server.log.read_text()
    assert " 503 " in log  # of the access log
    assert [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line] == []


def test_a_refusal_among_several_prompts_refuses_the_request(server: Server) -> None:
    with busy(server):
        several = {"prompt": ["to be", "or not"], "vllm_xargs": HOPELESS}
        answers = [ask(server, stream=stream, **several) for stream in (False, True)]
        answers.append(ask(server, n=2, temperature=1.0, vllm_xargs=HOPELESS))

    assert [answer.status for answer in answers] == [503, 503, 503]
    assert ask(server).status == 200


def test_what_the_controller_of_services_reads_is_what_came(server: Server) -> None:
    before, counted = observe.counts(metrics(server)), ends(server)

    for number in range(4):
        assert ask(server, max_tokens=3 + number).status == 200

    new_ends(server, counted, 4)
    after = observe.counts(metrics(server))
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert (new["requests"], new["attained"], new["output_tokens"]) == (4, 4, 3 + 4 + 5 + 6)
    assert new["prompt_tokens"] > 0.0
    assert not any(new.get(name, 0.0) for name in ("missed", "rejected", "aborted"))


def test_a_request_is_explained_by_the_id_that_its_client_sees(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):  # more than a refused one, for a replay
        answer = ask(server, max_tokens=4, vllm_xargs={"ttft_slo_ms": 90000})
        assert answer.status == 200
    name = answer.json["id"]
    assert eventually(lambda: explain.main([server.url, name]) == 0)  # reports take a moment
    text = capsys.readouterr().out
    assert text.startswith(name)
    assert "It met its targets." in text
    assert "with a prompt of 5 tokens" in text
    assert "Its 4 output tokens took" in text

    assert explain.main([server.url]) == 0
    assert "requests missed a target." in capsys.readouterr().out
    assert explain.main([server.url, name, "--replay"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "way", "stock vLLM", "sola_sched", "2 engines",
    ]  # fmt: skip
