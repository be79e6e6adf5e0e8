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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sola_sched.errors import EncoderError, PredictorFileError
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor, Pending
from sola_sched.length_predictor.process import protocol
from sola_sched.length_predictor.process.protocol import ServiceSettings
from sola_sched.length_predictor.process.text import Decode, SharedStart, load_tokenizer, readable

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
        self._has_told = False  # that nothing can be saved
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

    def run(self, *, save: Any = None, save_s: float = 0.0) -> None:
        """Serve until the scheduler is gone; call ``save`` every so often if it was given."""
        save_at_s = time.monotonic() + save_s
        saved = 0
        while self.turn():
            if save is not None and time.monotonic() >= save_at_s:
                if self.num_learned > saved and self._saved(save):
                    saved = self.num_learned
                save_at_s = time.monotonic() + save_s

    def _saved(self, save: Callable[[], None]) -> bool:
        """Save what was learned; where that fails, as on a full disk, predictions go on."""
        try:
            save()
        except OSError as error:
            if not self._has_told:
                logger.warning(
                    "sola_sched: what the predictor has learned cannot be saved, which is tried "
                    "again: %s",
                    error,
                )
            self._has_told = True
            return False
        self._has_told = False
        return True

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
            return True
        while True:
            try:
                packet = self._socket.recv(protocol.MAX_PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
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
            self._outbox.popleft()

    def _predict(self) -> None:
        if self._has_encoder and len(self._queue) > _BATCH:
            # A first answer for those that will have to wait for theirs.
            waiting = [handle for handle in self._queue if handle not in self._pending][_BATCH:]
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

    encoder = SentenceEncoder(settings.encoder or DEFAULT_ENCODER)
    from sola_sched.length_predictor.retrieval.index import use_one_thread
    from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor
    from sola_sched.length_predictor.storage import load_retrieval

    use_one_thread()
    encoder.encode(["The first call takes longer."])
    if is_new or path is None:
        return RetrievalPredictor(encoder)
    return load_retrieval(path, encoder)


def serve(connection: socket.socket, settings: ServiceSettings) -> None:
    """Load what is needed, say so, and serve."""
    try:
        decode = load_tokenizer(
            settings.tokenizer,
            revision=settings.tokenizer_revision,
            trust_remote_code=settings.trust_remote_code,
        )
        predictor = make_predictor(settings)
    except (EncoderError, PredictorFileError) as error:
        connection.send(protocol.FAILED + str(error).encode()[: protocol.MAX_PACKET - 1])
        # Closing over unread packets would make the scheduler see an error before the reason.
        while connection.recv(protocol.MAX_PACKET):
            pass
        return
    save = None
    if settings.path and settings.save_s > 0:
        from sola_sched.length_predictor.storage import save_predictor

        target = Path(settings.path)

        def save() -> None:
            save_predictor(target, predictor, {"num_prompts": service.num_learned})

    service = Service(connection, predictor, decode)
    connection.send(protocol.READY)
    service.run(save=save, save_s=settings.save_s)
    if save is not None:
        service.learn()
        service._saved(save)


def main(arguments: Mapping[str, Any]) -> None:
    """Entry of the process; ``arguments`` are the descriptor and the settings."""
    # Ctrl-C reaches the whole group: the scheduler decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments["fd"]))
    settings = ServiceSettings(**arguments["settings"])
    os.nice(settings.niceness)
    with contextlib.suppress(ConnectionError):  # the scheduler has gone
        serve(connection, settings)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
