"""`python -m sola_sched.explain`: of one request, of all, and the same minutes in virtual time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from fates import a_fate, ended, record_of
from html_report import Report
from virtual_runs import make_small_engine, make_workload

import sola_sched
from sola_sched.errors import ConfigError
from sola_sched.explain.cli import main
from sola_sched.explain.replay import Replay, Way
from sola_sched.explain.source import Window
from sola_sched.front_end.fates_http import answer
from sola_sched.reports.fates import FateBook, engine_facts, from_report, to_report

pytestmark = pytest.mark.vllm

ENGINE_ARGS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
    "block_size": 16,
    "num_gpu_blocks_override": 2000,
    "async_scheduling": True,
}
OPTIONS = {"ttft_s": 0.4, "tpot_s": 0.05}


@pytest.fixture(scope="module")
def recorded() -> Window:
    """What an engine has served that was somewhat overloaded."""
    engine = make_small_engine(sola_sched.Scheduler, OPTIONS)
    for request in make_workload(300, 16.0):
        engine.add(request)
    engine.run()
    monitor = engine.scheduler.sola_monitor
    facts = engine_facts(monitor.cost, ENGINE_ARGS, OPTIONS)
    assert facts is not None
    fates = list(from_report(to_report(monitor.fates.since(0, monitor.cost))))
    return Window(json.loads(json.dumps(fates[::-1])), json.loads(json.dumps(facts)))


def test_a_replay_without_vllm_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "window.json"
    path.write_text(json.dumps({"requests": [], "engine": None}))
    monkeypatch.setitem(sys.modules, "vllm", None)

    assert main([str(path), "--replay"]) == 2
    assert capsys.readouterr().err == (
        "error: a replay needs vLLM, which is not installed; install it, or see without "
        "'--replay' why requests were late.\n"
    )
    assert main([str(path)]) == 0


@pytest.fixture
def window_file(recorded: Window, tmp_path: Path) -> Path:
    path = tmp_path / "window.json"
    path.write_text(json.dumps(recorded.to_json()))
    return path


def _in_time(window: Window) -> float:
    return sum(fate["end"] == "attained" for fate in window.requests) / len(window.requests)


def test_a_replay_of_ours_comes_near_what_was_recorded(recorded: Window) -> None:
    replay = Replay(recorded)
    assert (replay.num_requests, replay.num_left_out) == (300, 0)
    records = replay.run(Way("ours", "sola"))
    assert [r.req_id for r in records] == [f["request_id"] for f in sorted(
        recorded.requests, key=lambda fate: float(fate["arrival_s"])
    )]  # fmt: skip
    attained = sum(record.attains(record.slo) for record in records if record.slo) / 300
    assert 0.1 < _in_time(recorded) < 0.97  # else nothing could differ
    assert attained == pytest.approx(_in_time(recorded), abs=0.06)


def test_more_engines_and_looser_targets_help(recorded: Window) -> None:
    replay = Replay(recorded)

    def attained(way: Way) -> float:
        records = replay.run(way)
        return sum(record.attains(record.slo) for record in records if record.slo) / 300

    as_it_was = attained(Way("ours", "sola"))
    assert attained(Way("2 engines", "sola", num_engines=2)) > as_it_was + 0.03
    assert attained(Way("later", "sola", ttft_s=4.0)) > as_it_was + 0.03
    assert attained(Way("few slots", "sola", engine_args={"max_num_seqs": 4})) < as_it_was - 0.03


def test_the_table_of_a_replay(window_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(window_file), "r7", "--replay", "--ttft", "4", "--max-num-seqs", "32"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("300 recorded requests, in virtual time:")
    labels = ["stock vLLM", "sola_sched", "TTFT 4 s", "32 slots", "2 engines"]
    lines = text.splitlines()[2:]
    assert lines[0].split("  ")[0] == "way"
    assert [line[: len(label)] for line, label in zip(lines[1:], labels, strict=True)] == labels
    assert "its TTFT" in lines[0]


def test_the_report_has_the_table_of_the_replay(
    window_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    path = window_file.with_suffix(".html")

    assert main([str(window_file), "r7", "--replay", "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(f"Report {path}.")
    found = Report(path)
    assert found.problems == []
    table = next(rows for rows in found.tables if rows[0][0] == "way")
    shown = [" ".join(row).split() for row in table]
    assert shown == [line.split() for line in printed.splitlines()[2 : 2 + len(table)]]
    assert len(shown) == 4


def test_all_and_one(window_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(window_file)]) == 0
    text = capsys.readouterr().out
    assert "of the last 300 requests missed a target. By target: " in text
    late = next(line for line in text.splitlines() if line.startswith("  r"))
    name = late.split()[0]
    assert main([str(window_file), name]) == 0
    story = capsys.readouterr().out
    assert story.startswith(f"{name} (class default). It was late: ")
    assert "It arrived with a prompt of " in story
    assert "What would have helped:" in story


def test_nobody_was_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "window.json"
    path.write_text(json.dumps(Window([a_fate()], None).to_json()))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "0 of the last 1 requests missed a target.\n"


def test_a_small_share_of_the_waits_is_not_called_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"end": "missed", "started_s": 20.0, "first_token_s": 20.5}
    late |= {"last_token_s": 21.0, "ended_s": 21.0}
    fates = [a_fate(**late, waited_s=(9.0, 0.0, 0.0)), a_fate(**late, waited_s=(0.0, 0.0, 0.01))]
    path = tmp_path / "window.json"
    path.write_text(json.dumps(Window(fates, None).to_json()))
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "What they waited for: a free slot 100 %, compute time under 1 %.\n" in said


class Page(BaseHTTPRequestHandler):
    """Answers as a server of ours does."""

    book = FateBook()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path.startswith("/sola/requests"):
            status, body = answer(path, query, self.book)
            text = json.dumps(body).encode()
        else:
            status, text = 404, b"no JSON"
        self.send_response(int(status))
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Page.book = FateBook()
    Page.book.add(to_report(ended(record_of(), record_of(end="missed", first_token_s=11.25))))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_and_its_answer_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    assert main([url, "r1", "--save", str(path)]) == 0
    asked = capsys.readouterr().out
    assert "It was late: its first token came 1.25 s after its arrival" in asked
    assert main([str(path), "r1"]) == 0
    assert capsys.readouterr().out == asked


def test_one_that_cannot_be_read_is_left_out_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "window.json", tmp_path / "kept.json"
    odd = a_fate("odd", priority=1_700_000_000_000_000_000, ttft_s=1e17)
    wrong = a_fate("wrong") | {"arrival_s": "soon"}
    path.write_text(json.dumps({"requests": [a_fate("one"), odd, wrong], "engine": None}))

    assert main([str(path), "--save", str(kept)]) == 0

    told = capsys.readouterr()
    assert "0 of the last 2 requests missed a target" in told.out
    assert told.err == "1 of 3 requests are left out (of request 3 'arrival_s' is soon).\n"
    assert [each["request_id"] for each in json.loads(kept.read_text())["requests"]] == [
        "one",
        "odd",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{url}", "nobody"], "'ID' must be that of a request in http"),
        (["{url}", "--replay"], "a replay needs the engine's settings and step times"),
        (["{url}/v2"], "the server must have a scheduler of ours and its statistics on"),
        (["http://127.0.0.1:9"], "must be a vLLM server with --scheduler-cls"),
        (["/no/such/file"], "must be the URL of a server or a file"),
        (["{folder}/words.txt"], "must be a file that --save has written"),
        (["{folder}/other.json"], "must hold the answer of /sola/requests"),
        (["{folder}/window.json", "r9999"], "'ID' must be that of a request in"),
        (["{folder}/lacks.json"], "(of request 1 it has no 'num_output')"),
        (["{folder}/wrong.json"], "(of request 1 'arrival_s' is soon)"),
        (["{folder}/engines.json"], "('engine' and 'engines' are something else)"),
        (["{folder}/facts.json", "--replay"], "needs the engine's settings and step times as"),
    ],
)
def test_what_cannot_be_explained_is_said_in_a_line(
    arguments: list[str],
    said: str,
    url: str,
    window_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = window_file.parent
    (folder / "words.txt").write_text("not JSON")
    one, other = a_fate("one"), a_fate("other")
    lacking = {name: value for name, value in other.items() if name != "num_output"}
    for name, document in (
        ("lacks", {"requests": [lacking]}),
        ("wrong", {"requests": [one | {"arrival_s": "soon"}]}),
        ("engines", {"requests": [one], "engine": None, "engines": {"first": {}}}),
        ("facts", {"requests": [one, other], "engine": {"gamma": {"prefill": 1.0}}}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(document))
    (folder / "other.json").write_text('{"requests": [{"name": 1}]}')
    assert main([each.format(url=url, folder=folder) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_replay_is_not_lost_in_vllms_log(window_file: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"}
    command = (sys.executable, "-P", "-m", "sola_sched.explain", str(window_file), "--replay")

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=240
    )

    assert "stock vLLM" in done.stdout
    for word in ("INFO", "WARNING", "Triton"):
        assert word not in done.stdout + done.stderr


def test_a_replay_needs_whole_answers(recorded: Window) -> None:
    rejected = [fate | {"end": "rejected"} for fate in recorded.requests]
    with pytest.raises(ConfigError, match="at least 2 requests with whole answers"):
        Replay(Window(rejected, recorded.engine))
