"""The predictor's process: reads requests from its scheduler, answers, learns, and asks nobody.

Started by `client.PredictionClient` as ``python -m sola_sched.length_predictor.process.service``.
It runs at the lowest priority on one thread. Everything arrives on one socket; an end of file there
means that the scheduler is gone, and so is this process then.

One turn of the loop: read all that has arrived; predict one batch; or, with nothing to predict,
learn from what has finished. If more wait than `_MAX_QUEUED`, the oldest get the answer of their
words alone, which takes microseconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sola_sched.errors import EncoderError, PredictorFileError
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor, Pending
from sola_sched.length_predictor.process import protocol
from sola_sched.length_predictor.process.protocol import ServiceSettings
from sola_sched.length_predictor.process.text import Decode, SharedStart, load_tokenizer, readable

if TYPE_CHECKING:  # its file format is of no use where nothing is saved
    from sola_sched.length_predictor.process.saving import SavedFile

logger = logging.getLogger(__name__)

# Encoded at once: more is not much faster a prompt, and the first would wait for the last.
_BATCH = 8
_MAX_QUEUED = 256
#: Requests whose prediction is remembered until they finish.
MAX_PENDING = 8192
_LEARN_AT_ONCE = 64
_LEARN_AFTER_S = 1.0
_MAX_OUTBOX = 1024
_RESEND_MS = 20.0


class Service:
    """Answers the packets of one scheduler.

    Args:
        connection: The socket to it.
        predictor: A lexical or retrieval predictor.
        decode: Token ids to text.
    """

    def __init__(self, connection: socket.socket, predictor: Any, decode: Decode) -> None:
        self.predictor = predictor
        self.num_learned = 0
        self._num_saved = 0
        self._is_gone = False  # the scheduler; what it sent before may still be unread
        self._was_reset = False
        self._socket = connection
        self._decode = decode
        self._shared = SharedStart()
        self._words: LexicalPredictor = getattr(predictor, "lexical", predictor)
        self._has_encoder = self._words is not predictor
        self._queue: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._pending: OrderedDict[int, Pending] = OrderedDict()
        self._finished: list[tuple[Pending, int, bool]] = []
        self._outbox: deque[bytes] = deque(maxlen=_MAX_OUTBOX)
        self._learn_at_s = 0.0
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def run(self, *, saved: SavedFile | None = None, save_s: float = 0.0) -> None:
        """Serve until the scheduler is gone; write what was learned every so often, and at last."""
        save_at_s = time.monotonic() + save_s
        try:
            while self.turn():
                if saved is not None and time.monotonic() >= save_at_s:
                    self._save(saved)
                    save_at_s = time.monotonic() + save_s
        finally:
            if saved is not None:
                self.learn()
                self._save(saved)

    def _save(self, saved: SavedFile) -> None:
        """Write what was learned, if that is more than what was written last."""
        if self.num_learned > self._num_saved and saved.save(self.predictor, self.num_learned):
            self._num_saved = self.num_learned

    def turn(self) -> bool:
        """One turn of the loop; False when the scheduler is gone."""
        is_idle = not self._queue
        wait_ms = 1000 * _LEARN_AFTER_S if is_idle and not self._finished else 0.0
        if is_idle and self._finished:
            wait_ms = max(0.0, 1000 * (self._learn_at_s - time.monotonic()))
        if self._outbox:
            wait_ms = min(wait_ms, _RESEND_MS)
        if not self._read(wait_ms):
            return False
        if self._is_gone:
            return True  # until all that it sent has been read
        self._send()
        if self._queue:
            self._predict()
        is_due = bool(self._finished) and (
            len(self._finished) >= _LEARN_AT_ONCE or time.monotonic() >= self._learn_at_s
        )
        if is_due and (not self._queue or len(self._finished) >= 4 * _LEARN_AT_ONCE):
            self.learn()
        return True

    def learn(self) -> None:
        """Take in the requests that have finished."""
        batch, self._finished = self._finished, []
        self.num_learned += len(batch)
        for is_encoded in (True, False):
            chosen = [each for each in batch if (each[0].vector is not None) == is_encoded]
            if chosen:
                pending, lengths, cut = zip(*chosen, strict=True)
                (self.predictor if is_encoded else self._words).learn(pending, lengths, cut)

    def _read(self, wait_ms: float) -> bool:
        if not self._poller.poll(wait_ms):
            return not self._is_gone
        while True:
            try:
                packet = self._socket.recv(protocol.MAX_PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return not self._is_gone
            except ConnectionResetError:
                # Said once, of answers that it left unread. What it sent comes after.
                if self._was_reset:
                    return False
                self._was_reset = True
                continue
            except OSError:
                return False
            if not packet:
                return False
            self._take(packet)

    def _readable(self, size: int, ids: Any) -> tuple[str, int]:
        """As `text.readable`; nothing of a prompt that the tokenizer cannot read."""
        try:
            return readable(self._decode, self._shared, size, ids)
        except Exception:  # tokenizers raise what they like for ids that they lack
            return "", size

    def _take(self, packet: bytes) -> None:
        kind = packet[:1]
        if kind == protocol.ARRIVED:
            handle, size, ids = protocol.parse_arrived(packet)
            self._queue[handle] = self._readable(size, ids)
            if len(self._queue) > _MAX_QUEUED:
                oldest, text = self._queue.popitem(last=False)
                self._answer([oldest], [text], self._words)
        elif kind == protocol.FINISHED:
            handle, num_output, is_cut = protocol.parse_finished(packet)
            self._queue.pop(handle, None)
            pending = self._pending.pop(handle, None)
            if pending is not None:
                if not self._finished:
                    self._learn_at_s = time.monotonic() + _LEARN_AFTER_S
                self._finished.append((pending, num_output, is_cut))
        elif kind == protocol.GONE:
            handle = protocol.parse_gone(packet)
            self._queue.pop(handle, None)
            self._pending.pop(handle, None)

    def _send(self) -> None:
        """Send what the scheduler has room for; it reads at its next step."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._is_gone = True
                self._outbox.clear()
                return
            self._outbox.popleft()

    def _predict(self) -> None:
        if self._has_encoder and len(self._queue) > _BATCH:
            # A first answer for those that will have to wait for theirs.
            later = list(self._queue)[_BATCH:]
            waiting = [handle for handle in later if handle not in self._pending]
            if waiting:
                self._answer(waiting, [self._queue[handle] for handle in waiting], self._words)
        handles = list(self._queue)[:_BATCH]
        self._answer(handles, [self._queue.pop(handle) for handle in handles], self.predictor)

    def _answer(self, handles: list[int], prompts: list[tuple[str, int]], predictor: Any) -> None:
        answers, pending = predictor.consider(*zip(*prompts, strict=True))
        self._pending.update(zip(handles, pending, strict=True))
        pairs = list(zip(handles, answers, strict=True))
        for start in range(0, len(pairs), protocol.MAX_ANSWERS):
            self._outbox.append(protocol.answers(pairs[start : start + protocol.MAX_ANSWERS]))
        self._send()
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)


def make_predictor(settings: ServiceSettings) -> Any:
    """Load or start the predictor that the settings name.

    Raises:
        EncoderError, PredictorFileError: It cannot be had.
    """
    path = Path(settings.path) if settings.path else None
    # A file that is to be written need not be there yet.
    is_new = path is None or (settings.save_s > 0 and not path.exists())
    if settings.kind == "lexical":
        if is_new or path is None:
            return LexicalPredictor()
        from sola_sched.length_predictor.storage import load_lexical

        return load_lexical(path)
    from sola_sched.length_predictor.retrieval.embed import DEFAULT_ENCODER, SentenceEncoder
    from sola_sched.length_predictor.retrieval.index import use_one_thread
    from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor
    from sola_sched.length_predictor.storage import load_retrieval, read_header

    name = settings.encoder or DEFAULT_ENCODER
    if is_new or path is None:
        encoder = SentenceEncoder(name)
    else:
        encoder = SentenceEncoder.as_of(read_header(path).get("encoder"), name)
    use_one_thread()
    encoder.encode(["The first call takes longer."])
    if is_new or path is None:
        return RetrievalPredictor(encoder)
    return load_retrieval(path, encoder)


def serve(connection: socket.socket, settings: ServiceSettings) -> None:
    """Load what is needed, say so, and serve."""
    saved = None
    try:
        decode = load_tokenizer(
            settings.tokenizer,
            revision=settings.tokenizer_revision,
            trust_remote_code=settings.trust_remote_code,
        )
        if settings.path and settings.save_s > 0:
            from sola_sched.length_predictor.process.saving import SavedFile

            saved = SavedFile(Path(settings.path), settings.kind)
        predictor = make_predictor(settings)
    except Exception as error:  # of files, packages, tokenizers, encoders
        reason = str(error)
        if not isinstance(error, EncoderError | PredictorFileError):
            logger.exception("sola_sched: the predictor could not be loaded")
            reason = f"It could not be loaded ({type(error).__name__}: {error})."
        if saved is not None:
            saved.close()
        _say_that_it_failed(connection, reason)
        return
    try:
        service = Service(connection, predictor, decode)
        connection.send(protocol.READY)
        service.run(saved=saved, save_s=settings.save_s)
    finally:
        if saved is not None:
            saved.close()


def _say_that_it_failed(connection: socket.socket, reason: str) -> None:
    data = reason.encode(errors="replace")[: protocol.MAX_PACKET - 1]
    connection.send(protocol.FAILED + data)
    # Closing over unread packets would make the scheduler see an error before the reason.
    while connection.recv(protocol.MAX_PACKET):
        pass


def main(arguments: Mapping[str, Any]) -> None:
    """Entry of the process; ``arguments`` are the descriptor and the settings."""
    # What reaches the whole group, as Ctrl-C does, does not end this process: its scheduler does,
    # by closing the socket, and what was learned is saved then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments["fd"]))
    settings = ServiceSettings(**arguments["settings"])
    os.nice(settings.niceness)
    with contextlib.suppress(ConnectionError):  # the scheduler has gone
        serve(connection, settings)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
