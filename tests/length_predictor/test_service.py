"""The predictor process: packets, answers, and what it learns."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompts import WordEncoder

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.process import protocol, service
from sola_sched.length_predictor.process.saving import SavedFile
from sola_sched.length_predictor.process.service import Service
from sola_sched.length_predictor.process.text import SharedStart, readable
from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor
from sola_sched.length_predictor.storage import read_file
from sola_sched.prediction.length import LengthPrediction

#: At its own niceness, 19, the process may not get far on a busy machine.
ServiceSettings = partial(protocol.ServiceSettings, niceness=1)
#: A process starts in about a second; a busy machine may take its time.
PATIENCE_S = 60.0
#: A call of the client on the scheduler's path, median of many; measured 1 to 10 µs.
MAX_CALL_S = 200e-6


def decode(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    yield mine, theirs
    mine.close()
    theirs.close()


def received(mine: socket.socket) -> list[tuple[int, LengthPrediction]]:
    found = []
    while True:
        try:
            packet = mine.recv(protocol.MAX_PACKET)
        except BlockingIOError:
            return found
        found += protocol.parse_answers(packet)


@given(
    handle=st.integers(0, 2**64 - 1),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=1000),
    num_output=st.integers(0, 2**32 - 1),
)
def test_packets_carry_what_was_packed(handle: int, ids: list[int], num_output: int) -> None:
    packet = protocol.arrived(handle, ids)

    assert len(packet) <= protocol.MAX_PACKET
    half = protocol.MAX_TOKENS // 2
    cut = ids if len(ids) <= protocol.MAX_TOKENS else [*ids[:half], *ids[-half:]]
    assert protocol.parse_arrived(packet) == (handle, len(ids), cut)
    done = protocol.finished(handle, num_output, True)
    assert protocol.parse_finished(done) == (handle, num_output, True)
    assert protocol.parse_gone(protocol.gone(handle)) == handle


def test_answers_carry_predictions() -> None:
    pairs = [(number, LengthPrediction(range(1, 11), "lexical")) for number in range(64)]

    packet = protocol.answers(pairs)

    assert len(packet) <= protocol.MAX_PACKET
    back = protocol.parse_answers(packet)
    assert [(handle, each.source) for handle, each in back] == [(n, "lexical") for n in range(64)]
    assert back[0][1].quantiles.tolist() == list(range(1, 11))


def test_service_answers_and_learns_from_what_finished(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = ends
    predictor = RetrievalPredictor(WordEncoder())
    server = Service(theirs, predictor, decode)
    for handle in range(40):
        mine.send(protocol.arrived(handle, [1, 2, 3, 4]))
    server.turn()
    while server._queue:
        server.turn()
    assert {handle for handle, _ in received(mine)} == set(range(40))

    for handle in range(40):
        mine.send(protocol.finished(handle, 700, False))
    mine.send(protocol.gone(99))
    server.turn()
    server.learn()
    mine.send(protocol.arrived(100, [1, 2, 3, 4]))
    server.turn()

    [(handle, prediction)] = received(mine)
    assert (handle, prediction.source) == (100, "neighbours")
    assert prediction.median == pytest.approx(700, rel=0.4)
    assert server.num_learned == 40
    assert len(predictor.store) == 16  # of one exact prompt


def test_flood_gets_the_answer_of_the_words_and_loses_nobody(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MAX_QUEUED", 20)
    mine, theirs = ends
    encoder = WordEncoder()
    server = Service(theirs, RetrievalPredictor(encoder), decode)
    for handle in range(100):
        mine.send(protocol.arrived(handle, [handle, 2, 3]))

    server.turn()
    first = received(mine)
    while server._queue:
        server.turn()
    rest = received(mine)

    assert {handle for handle, _ in first} == set(range(100))
    assert encoder.num_encoded == 20
    assert {handle for handle, _ in rest} <= set(range(80, 100))


def test_aborted_request_is_neither_predicted_nor_learned(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = ends
    server = Service(theirs, LexicalPredictor(), decode)
    mine.send(protocol.arrived(1, [5, 6]))
    mine.send(protocol.gone(1))
    mine.send(protocol.finished(1, 50, False))

    server.turn()
    server.learn()

    assert received(mine) == []
    assert server.num_learned == 0


def test_service_ends_with_its_scheduler(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    server = Service(theirs, LexicalPredictor(), decode)

    mine.close()

    assert not server.turn()


def test_answers_wait_for_a_scheduler_that_does_not_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = Service(theirs, LexicalPredictor(), decode)
    found: list[tuple[int, LengthPrediction]] = []
    for handle in range(300):
        mine.send(protocol.arrived(handle, [handle]))
        server.turn()

    while len(found) < 300:
        found += received(mine)
        assert server.turn()

    assert [handle for handle, _ in found] == list(range(300))


def test_shared_start_is_left_out_once_it_is_known() -> None:
    shared = SharedStart()
    system = list(range(1000, 1064))
    texts = [
        readable(decode, shared, 64 + 12, system + list(range(n, n + 12)))[0] for n in range(30)
    ]

    assert "w1000" in texts[0]
    assert "w1000" not in texts[-1]
    assert "w1063" not in texts[-1]
    assert "w29" in texts[-1].split()


def test_cut_prompt_is_read_from_both_ends_and_counts_in_full() -> None:
    ids = list(range(100, 100 + protocol.MAX_TOKENS))

    text, num_chars = readable(decode, SharedStart(), 10 * len(ids), ids)

    assert text.split() == decode(ids).split()
    assert num_chars == pytest.approx(10 * len(text), rel=0.01)


def test_newcomers_get_a_first_answer_while_others_wait_for_their_second(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = ends
    server = Service(theirs, RetrievalPredictor(WordEncoder()), decode)
    for handle in range(40):
        mine.send(protocol.arrived(handle, [handle, 2, 3]))
    server.turn()
    received(mine)
    for handle in range(100, 105):
        mine.send(protocol.arrived(handle, [handle, 2, 3]))

    server.turn()

    assert {handle for handle, _ in received(mine)} >= set(range(100, 105))


def learning(predictor: Any, connection: socket.socket, path: Path) -> tuple[Service, SavedFile]:
    return Service(connection, predictor, decode), SavedFile(path, predictor.kind)


def finish(mine: socket.socket, server: Service, count: int) -> None:
    for handle in range(count):
        mine.send(protocol.arrived(handle, [handle, 2, 3]))
    turns = (server.turn() for _ in range(1000))
    assert any(not server._queue and len(server._pending) >= count for _ in turns)
    for handle in range(count):
        mine.send(protocol.finished(handle, 700, False))


def num_words_learned(path: Path) -> int:
    return int(read_file(path)[1]["lexical/scalars"][2])


@pytest.mark.parametrize("are_read", [False, True])
@pytest.mark.parametrize("kind", [LexicalPredictor, partial(RetrievalPredictor, WordEncoder())])
def test_what_was_learned_is_saved_when_the_scheduler_ends_while_prompts_wait(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, kind: Any, are_read: bool
) -> None:
    mine, theirs = ends
    path = tmp_path / "lengths.sola"
    server, saved = learning(kind(), theirs, path)
    finish(mine, server, 30)
    for handle in range(100, 130):
        mine.send(protocol.arrived(handle, [handle, 2, 3]))
    if are_read:
        received(mine)
    mine.close()

    server.run(saved=saved, save_s=3600.0)

    assert num_words_learned(path) == 30


def test_a_scheduler_that_ends_during_a_prediction_loses_nothing(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    mine, theirs = ends
    path = tmp_path / "lengths.sola"
    encoder = WordEncoder()
    server, saved = learning(RetrievalPredictor(encoder), theirs, path)
    finish(mine, server, 30)
    assert server.turn()
    encode = encoder.encode

    def ends_meanwhile(texts: list[str]) -> Any:
        mine.send(protocol.finished(200, 700, False))
        mine.close()
        return encode(texts)

    encoder.encode = ends_meanwhile  # type: ignore[method-assign, assignment]
    mine.send(protocol.arrived(200, [9, 9, 9]))

    server.run(saved=saved, save_s=3600.0)

    assert num_words_learned(path) == 31


def test_what_was_learned_is_saved_where_a_prediction_fails(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    mine, theirs = ends
    path = tmp_path / "lengths.sola"
    predictor = LexicalPredictor()
    server, saved = learning(predictor, theirs, path)
    finish(mine, server, 30)
    assert server.turn()
    predictor.consider = None  # type: ignore[assignment, method-assign]
    mine.send(protocol.arrived(200, [9, 9, 9]))

    with pytest.raises(TypeError):
        server.run(saved=saved, save_s=3600.0)

    assert num_words_learned(path) == 30


def test_a_prompt_that_the_tokenizer_cannot_read_is_answered_all_the_same(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    def fails(ids: list[int]) -> str:
        raise KeyError(ids[0])

    mine, theirs = ends
    served = Service(theirs, LexicalPredictor(), fails)
    mine.send(protocol.arrived(7, [900_000, 1]))
    assert served.turn()

    assert [handle for handle, _ in received(mine)] == [7]
