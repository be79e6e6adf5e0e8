"""The client of the predictor process: floods, deaths, what is kept, and what a call costs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.bench.backends.model import TINY_SHAPE, write_model
from sola_sched.length_predictor.process import client as client_module
from sola_sched.length_predictor.process import protocol
from sola_sched.length_predictor.process.client import MAX_BACKLOG, PredictionClient
from sola_sched.length_predictor.process.text import load_tokenizer

#: At its own niceness, 19, the process may not get far on a busy machine.
ServiceSettings = partial(protocol.ServiceSettings, niceness=1)
#: A process starts in about a second; a busy machine may take its time.
PATIENCE_S = 60.0
#: A call of the client on the scheduler's path, median of many; measured 1 to 10 µs.
MAX_CALL_S = 200e-6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", TINY_SHAPE)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The client's warnings, whatever an engine has done to vLLM's loggers."""
    said: list[str] = []
    monkeypatch.setattr(
        client_module.logger, "warning", lambda text, *args: said.append(text % args)
    )
    return said


def until(condition: Callable[[], bool], client: PredictionClient) -> list[tuple[str, object]]:
    answers: list[tuple[str, object]] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        answers += client.poll()
        assert time.monotonic() < give_up_s, client.stats()
        time.sleep(0.005)
    return answers


def test_tokenizer_folder_gives_the_text_back(model_dir: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("Hello, you!").ids

    assert load_tokenizer(str(model_dir))(ids) == "Hello, you!"


def test_process_answers_dies_and_comes_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FIRST_BACK_OFF_S", 0.05)
    client = PredictionClient(ServiceSettings("lexical", str(model_dir)))
    try:
        for number in range(20):
            client.submit(f"r{number}", [10 + number, 20, 30])
        until(lambda: client.counts["num_answered"] == 20, client)
        assert client.is_ready
        for number in range(10):
            client.ended(f"r{number}", 5, is_cut=False)
        client.ended("r10", 0, is_cut=False)
        assert client.pid is not None
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, client.pid) >= min(19, nice + 1)

        os.kill(client.pid, signal.SIGKILL)
        until(lambda: client.counts["num_restarts"] == 1, client)
        client.submit("while it is down", [1, 2])
        until(lambda: client.counts["num_answered"] == 21, client)

        client.ended("r11", 5, is_cut=False)  # unknown to the new process
        client.submit("after", [1, 2, 3])
        answers = until(lambda: client.counts["num_answered"] == 22, client)
        assert [name for name, _ in answers] == ["after"]
        assert client.counts["num_dropped"] == 0
    finally:
        client.close()
    assert client.pid is None


def test_what_cannot_work_is_said_once_and_not_retried(tmp_path: Path, model_dir: Path) -> None:
    bad = tmp_path / "bad.sola"
    bad.write_bytes(b"nonsense")
    client = PredictionClient(ServiceSettings("lexical", str(model_dir), path=str(bad)))
    try:
        client.submit("r", [1])
        until(lambda: client.pid is None, client)
        client.submit("s", [1])
        assert client.poll() == []
        assert client.counts["num_restarts"] == 0
    finally:
        client.close()


@pytest.mark.parametrize(
    "content", ['{"version":"1.0"', '{"model": {"type": "Future"}}', "", '"text"']
)
def test_a_tokenizer_that_cannot_be_read_is_said_once_and_not_retried(
    tmp_path: Path, content: str, warnings: list[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    client = PredictionClient(ServiceSettings("lexical", str(tmp_path)))
    try:
        until(lambda: client.pid is None, client)
        assert client.counts["num_restarts"] == 0
    finally:
        client.close()
    assert len(warnings) == 1
    assert "needs the model's tokenizer" in warnings[0]


def test_whatever_loading_raises_is_said_once_and_not_retried(
    tmp_path: Path, model_dir: Path, warnings: list[str]
) -> None:
    client = PredictionClient(ServiceSettings("lexical", str(model_dir), path="\0"))
    try:
        until(lambda: client.pid is None, client)
        assert client.counts["num_restarts"] == 0
    finally:
        client.close()
    assert "It could not be loaded (ValueError" in warnings[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_process_group_loses_nothing(
    tmp_path: Path, model_dir: Path, number: signal.Signals
) -> None:
    path = tmp_path / "state.sola"
    client = PredictionClient(
        ServiceSettings("lexical", str(model_dir), path=str(path), save_s=3600.0)
    )
    for each in range(20):
        client.submit(f"r{each}", [40, 41, each])
    until(lambda: client.counts["num_answered"] == 20, client)
    assert client.pid is not None
    os.kill(client.pid, number)
    for each in range(20):
        client.ended(f"r{each}", 300, is_cut=False)

    client.close()

    assert path.exists()


def is_gone(pid: int) -> bool:
    """Whether a process is not even there as a defunct one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_defunct_process_stays_of_one_that_could_not_work(
    tmp_path: Path, model_dir: Path
) -> None:
    settings = ServiceSettings("lexical", str(model_dir), path=str(tmp_path / "none.sola"))
    client = PredictionClient(settings)
    pid = client.pid
    assert pid is not None
    try:
        until(lambda: client.pid is None, client)
        until(lambda: is_gone(pid), client)
    finally:
        client.close()


def test_no_defunct_process_stays_of_one_that_was_given_up() -> None:
    now = [0.0]
    client = PredictionClient(
        ServiceSettings("lexical", "none"), clock=lambda: now[0], command=Silent.command
    )
    pid = client.pid
    assert pid is not None
    try:
        client.submit("r", [1])
        now[0] = client_module._START_TIMEOUT_S + 1.0
        client.poll()
        assert client.pid is None
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_gone(pid):  # nobody calls the client, as on an idle engine
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
    finally:
        client.close()


def test_where_no_more_files_may_be_open_it_is_started_later(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    now = [0.0]
    client = PredictionClient(
        ServiceSettings("lexical", "none"), clock=lambda: now[0], command=Silent.command
    )

    def fail(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    try:
        client.submit("r", [1])
        now[0] = client_module._START_TIMEOUT_S + 1.0
        client.poll()
        with monkeypatch.context() as short_of_files:
            short_of_files.setattr(socket, "socketpair", fail)
            now[0] = client._start_at_s
            assert client.poll() == []
        assert "Too many open files" in warnings[-1]
        assert client._process is None
        assert client._start_at_s > now[0]
        now[0] = client._start_at_s
        client.poll()
        assert client._process is not None
    finally:
        client.close()


def test_learned_state_is_written_and_read_again(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "state.sola"
    settings = ServiceSettings("lexical", str(model_dir), path=str(path), save_s=3600.0)
    for medians in ([], [0.0]):
        client = PredictionClient(settings)
        client.submit("first", [40, 41, 42])
        [(_, prediction)] = until(lambda: client.counts["num_answered"] == 1, client)  # noqa: B023
        medians.append(prediction.median)
        for number in range(60):
            client.submit(f"r{number}", [40, 41, 42])
        until(lambda: client.counts["num_answered"] == 61, client)  # noqa: B023
        for number in range(60):
            client.ended(f"r{number}", 3000, is_cut=False)
        until(lambda: not client._backlog, client)  # noqa: B023
        client.close()
        assert path.exists()
    assert medians[-1] > 300


class Silent:
    """A process that reads nothing: `sleep`, whatever its arguments."""

    command = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_full_socket_costs_the_latest_arrivals_no_end_and_no_time() -> None:
    client = PredictionClient(ServiceSettings("lexical", "none"), command=Silent.command)
    try:
        prompt = list(range(400))
        times = []
        for number in range(2 * MAX_BACKLOG):
            start = time.perf_counter()
            client.submit(f"r{number}", prompt)
            client.poll()
            times.append(time.perf_counter() - start)

        assert client.counts["num_dropped"] > 0
        assert len(client._backlog) == MAX_BACKLOG
        num_submitted = client.counts["num_submitted"]
        for number in range(2 * MAX_BACKLOG):
            client.ended(f"r{number}", 5, is_cut=False)
        assert len(client._backlog) == MAX_BACKLOG + num_submitted  # no end of a known one is lost
        assert sorted(times)[len(times) // 2] < MAX_CALL_S
    finally:
        client._process.kill()  # type: ignore[union-attr]
        client.close()


def test_process_that_never_answers_is_replaced() -> None:
    now = [0.0]
    client = PredictionClient(
        ServiceSettings("lexical", "none"), clock=lambda: now[0], command=Silent.command
    )
    try:
        first = client.pid
        client.submit("r", [1])
        client.poll()
        now[0] = client_module._START_TIMEOUT_S + 1.0
        client.poll()
        assert (client.counts["num_restarts"], client.pid) == (1, None)
        assert client.counts["num_unanswered_at_restart"] == 1

        client.poll()
        assert client.pid is None  # still in the back-off
        now[0] += client_module._FIRST_BACK_OFF_S
        client.poll()
        assert client.pid not in (None, first)
    finally:
        client._process.kill()  # type: ignore[union-attr]
        client.close()


def test_time_to_load_is_not_time_to_answer() -> None:
    now = [0.0]
    says_ready = (
        sys.executable,
        "-c",
        "import json, socket, sys, time\n"
        "end = socket.socket(fileno=json.loads(sys.argv[1])['fd'])\n"
        "end.send(b'R')\n"
        "time.sleep(600)",
    )
    client = PredictionClient(
        ServiceSettings("lexical", "none"), clock=lambda: now[0], command=says_ready
    )
    try:
        client.submit("r", [1])
        now[0] = 2.0 * client_module._ANSWER_TIMEOUT_S  # it loads slowly
        until(lambda: client.is_ready, client)
        client.poll()
        assert client.counts["num_restarts"] == 0

        now[0] += client_module._ANSWER_TIMEOUT_S + 1.0  # and then says nothing
        client.poll()
        assert client.counts["num_restarts"] == 1
    finally:
        client.close()


def test_a_process_that_answers_others_is_kept_whatever_a_burst_has_dropped() -> None:
    now = [0.0]
    answers_all_but_the_first = (
        sys.executable,
        "-c",
        "import json, socket, sys\n"
        "from sola_sched.length_predictor.process import protocol as p\n"
        "from sola_sched.prediction.length import LengthPrediction\n"
        "end = socket.socket(fileno=json.loads(sys.argv[-1])['fd'])\n"
        "end.send(p.READY)\n"
        "while packet := end.recv(p.MAX_PACKET):\n"
        "    handle = p.parse_arrived(packet)[0]\n"
        "    if handle:\n"
        "        end.send(p.answers([(handle, LengthPrediction.exactly(9))]))\n",
    )
    client = PredictionClient(
        ServiceSettings("lexical", "none"),
        clock=lambda: now[0],
        command=answers_all_but_the_first,
    )
    try:
        until(lambda: client.is_ready, client)
        client.submit("dropped", [1])
        now[0] = 1.0
        client.submit("other", [1])
        until(lambda: client.counts["num_answered"] == 1, client)

        now[0] += client_module._ANSWER_TIMEOUT_S
        client.submit("later", [1])
        until(lambda: client.counts["num_answered"] == 2, client)
        assert client.counts["num_restarts"] == 0

        now[0] += client_module._ANSWER_TIMEOUT_S + 1.0
        client.poll()
        assert client.counts["num_restarts"] == 0
    finally:
        client.close()
