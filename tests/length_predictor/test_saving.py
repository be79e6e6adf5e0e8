"""The file that a predictor's process writes: when, by whom and over what."""

from __future__ import annotations

import errno
import fcntl
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from prompts import WordEncoder

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.errors import PredictorFileError
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.process import protocol, saving, service
from sola_sched.length_predictor.process.saving import SavedFile
from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor
from sola_sched.length_predictor.storage import read_file, save_predictor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lengths.sola"


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(saving.logger, "warning", lambda text, *args: told.append(text % args))
    return told


def taught(length: int = 700) -> LexicalPredictor:
    predictor = LexicalPredictor()
    _, pending = predictor.consider(["some words"] * 20)
    predictor.learn(pending, [length] * 20, [False] * 20)
    return predictor


def num_learned(path: Path) -> int:
    return int(read_file(path)[1]["lexical/scalars"][2])


class Engine:
    """A predictor's process in a thread, over this end of a socket."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "load_tokenizer", lambda *_, **__: str)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = protocol.ServiceSettings("lexical", "none", path=str(path), save_s=3600.0)
        self._thread = threading.Thread(target=service.serve, args=(theirs, settings))
        self._thread.start()
        assert self.socket.recv(protocol.MAX_PACKET) == protocol.READY

    def learn(self, count: int) -> None:
        for handle in range(count):
            self.socket.send(protocol.arrived(handle, [1, 2, handle]))
            self.socket.recv(protocol.MAX_PACKET)
        for handle in range(count):
            self.socket.send(protocol.finished(handle, 500, False))

    def end(self) -> None:
        self.socket.close()
        self._thread.join()


def test_an_idle_engine_leaves_what_another_has_learned(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    one, idle = Engine(path, monkeypatch), Engine(path, monkeypatch)
    one.learn(40)
    one.end()
    idle.end()

    assert num_learned(path) == 40
    assert len(warnings) == 1
    assert f"is not saved to {path}: another process saves" in warnings[0]


def test_of_two_engines_that_learn_the_first_saves(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    one, two = Engine(path, monkeypatch), Engine(path, monkeypatch)
    one.learn(40)
    two.learn(5)
    for engine in (one, two):
        engine.end()

    assert num_learned(path) == 40
    assert sorted(path.parent.iterdir()) == [path]  # no lock stays


def test_an_idle_engine_writes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_predictor(path, taught(), {"datasets": ["made up"]})
    before = path.stat()

    Engine(path, monkeypatch).end()

    assert path.stat() == before or path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_the_next_engine_saves_when_the_first_has_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    for _ in range(2):
        engine = Engine(path, monkeypatch)
        engine.learn(10)
        engine.end()

    assert num_learned(path) == 20
    assert warnings == []


def test_an_engine_that_started_before_another_ended_saves_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    save_predictor(path, taught(), {"num_prompts": 20})
    old, new = Engine(path, monkeypatch), Engine(path, monkeypatch)
    new.learn(10)
    old.end()
    new.end()

    assert read_file(path)[0]["about"] == {"num_prompts": 30, "num_live": 10}
    assert len(warnings) == 1
    assert "This one does when that has ended" in warnings[0]
    assert sorted(path.parent.iterdir()) == [path]


def test_what_the_one_before_has_saved_stays_and_is_taken_over_at_a_restart(
    path: Path, warnings: list[str]
) -> None:
    old, new = SavedFile(path, "lexical"), SavedFile(path, "lexical")
    assert not new.save(taught(), 1)
    assert old.save(taught(), 20)
    old.close()

    assert not new.save(taught(), 2)
    assert not new.save(taught(), 3)
    restarted = SavedFile(path, "lexical")
    assert restarted.save(taught(), 4)  # though the other one still runs
    new.close()
    restarted.close()

    assert read_file(path)[0]["about"]["num_prompts"] == 24
    assert len(warnings) == 2
    assert "another process has written it" in warnings[1]
    assert warnings[1].endswith("A restart takes over what is there.")


def test_a_file_that_was_built_anew_meanwhile_stays(path: Path, warnings: list[str]) -> None:
    save_predictor(path, taught(), {})
    saved = SavedFile(path, "lexical")
    save_predictor(path, taught(), {"datasets": ["new"]})

    assert not saved.save(taught(), 20)
    assert not saved.save(taught(), 40)

    assert read_file(path)[0]["about"] == {"datasets": ["new"]}
    assert len(warnings) == 1
    assert "another process has written it" in warnings[0]
    saved.close()


def test_without_locks_the_file_itself_tells(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    one, two = SavedFile(path, "lexical"), SavedFile(path, "lexical")

    assert one.save(taught(), 20)
    assert one.save(taught(), 40)
    assert not two.save(taught(), 5)

    assert read_file(path)[0]["about"]["num_prompts"] == 40


def test_a_lock_that_its_holder_removes_is_taken_anew(path: Path, warnings: list[str]) -> None:
    first = SavedFile(path, "lexical")
    first.close()
    second = SavedFile(path, "lexical")
    third = SavedFile(path, "lexical")

    assert second.save(taught(), 20)
    assert not third.save(taught(), 20)
    third.close()
    assert len(list(path.parent.iterdir())) == 2  # the file and the second's lock
    second.close()


def test_a_lock_that_was_removed_just_before_it_was_had_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    lock, locked = path.with_name(f".{path.name}.lock"), []
    flock = fcntl.flock

    def after_its_holder_ended(handle: int, operation: int) -> None:
        if not locked:
            lock.unlink()
        locked.append(handle)
        flock(handle, operation)

    with monkeypatch.context() as once:
        once.setattr(fcntl, "flock", after_its_holder_ended)
        first = SavedFile(path, "lexical")
    second = SavedFile(path, "lexical")

    assert len(locked) == 2
    assert first.save(taught(), 20)
    assert not second.save(taught(), 20)
    assert len(warnings) == 1
    first.close()


def test_what_a_file_was_built_from_is_carried_on_and_counted_on_top(path: Path) -> None:
    save_predictor(path, taught(), {"datasets": ["alpaca"], "num_prompts": 1000})
    for _ in range(2):
        saved = SavedFile(path, "lexical")
        assert saved.save(taught(), 3)
        assert saved.save(taught(), 20)
        saved.close()

    about = read_file(path)[0]["about"]
    assert about == {"datasets": ["alpaca"], "num_prompts": 1040, "num_live": 40}


def test_a_lexical_predictor_is_not_saved_over_a_retrieval_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_predictor(path, RetrievalPredictor(WordEncoder()), {})
    before = path.read_bytes()
    monkeypatch.setattr(service, "load_tokenizer", lambda *_, **__: str)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = protocol.ServiceSettings("lexical", "none", path=str(path), save_s=60.0)
    thread = threading.Thread(target=service.serve, args=(theirs, settings))

    thread.start()
    answer = mine.recv(protocol.MAX_PACKET)
    mine.close()
    thread.join()

    assert answer[:1] == protocol.FAILED
    assert b"only over a file of its own kind" in answer
    assert path.read_bytes() == before
    with pytest.raises(PredictorFileError, match="name another 'predictor_path'"):
        SavedFile(path, "lexical")


def test_what_cannot_be_saved_ends_nothing_and_is_told_once(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saved = SavedFile(path, "lexical")
    with monkeypatch.context() as full:
        full.setattr(saving, "save_predictor", fail)
        assert not saved.save(taught(), 20)
        assert not saved.save(taught(), 20)
    assert saved.save(taught(), 20)
    saved.close()

    assert path.exists()
    assert warnings == [
        "sola_sched: what the predictor has learned cannot be saved, which is tried again: "
        "[Errno 28] No space left on device"
    ]
