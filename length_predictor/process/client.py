"""The scheduler's side of the predictor process: microseconds a step, and it never waits.

Nothing here blocks. Requests are written to a socket that takes them or does not; answers are read
when a step is planned. What does not fit waits in a bounded list; what does not fit there, and all
that a dead process knew, is predicted by the histogram alone. A process that dies, or does not
answer, is started again after 1, 2, 4 ... 60 s. What happened is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sola_sched.config.sola_config import SolaConfig
from sola_sched.length_predictor.process import protocol
from sola_sched.length_predictor.process.protocol import ServiceSettings
from sola_sched.prediction.length import LengthPrediction

logger = logging.getLogger("vllm.sola_sched")

#: With so many packets that wait for room in the socket no further request is submitted; the ends
#: of those that were still are.
MAX_BACKLOG = 1024
#: Packets and answers handled in one call, so that a burst does not stretch one step.
MAX_PER_CALL = 32
_BUFFER_BYTES = 1 << 20
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 60.0
_HEALTHY_AFTER_S = 60.0
_START_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0  # it may be writing what it learned

Answer = tuple[str, LengthPrediction]


class PredictionClient:
    """Sends a scheduler's requests to a predictor process and collects the answers.

    Args:
        settings: What the process runs.
        clock: Real time in seconds, also where the scheduler's own clock is virtual.
        command: Starts the process, without its last argument; for tests.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = (
            sys.executable,
            "-P",
            "-m",
            "sola_sched.length_predictor.process.service",
        ),
    ) -> None:
        self.settings = settings
        self.counts = dict.fromkeys(
            (
                "num_submitted",
                "num_answered",
                "num_late",
                "num_dropped",
                "num_restarts",
                "num_unanswered_at_restart",
            ),
            0,
        )
        self._clock = clock
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._has_failed = False
        self._is_closed = False
        self._back_off_s = _FIRST_BACK_OFF_S
        self._start_at_s = 0.0
        self._started_s = self._ready_s = self._heard_s = 0.0
        self._next_handle = 0
        self._handle_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        # Time of submission of what has no answer yet, oldest first.
        self._unanswered: dict[int, float] = {}
        self._backlog: deque[bytes] = deque()
        self._start()

    @property
    def is_ready(self) -> bool:
        """Whether a process is up and has loaded its models."""
        return self._is_ready

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process is not None else None

    def stats(self) -> dict[str, Any]:
        """Counters, and whether the process is ready."""
        return {"ready": self._is_ready, **self.counts}

    def submit(self, req_id: str, token_ids: Sequence[int] | None) -> None:
        """A request arrived; an answer may come with a later ``poll``.

        Args:
            req_id: Its name.
            token_ids: Its prompt; None (embeddings only) is not predicted.
        """
        if self._has_failed or not token_ids or req_id in self._handle_of:
            return
        if len(self._backlog) >= MAX_BACKLOG:
            self.counts["num_dropped"] += 1
            return
        handle = self._next_handle
        self._next_handle += 1
        self._handle_of[req_id] = handle
        self._name_of[handle] = req_id
        self._unanswered[handle] = self._clock()
        self.counts["num_submitted"] += 1
        self._send(protocol.arrived(handle, token_ids))

    def ended(self, req_id: str, num_output: int, *, is_cut: bool) -> None:
        """A request ended, and is learned from.

        Args:
            req_id: Its name; unknown ones are ignored.
            num_output: Tokens it generated; 0 if it was aborted, which teaches nothing.
            is_cut: Whether it ended at its token limit.
        """
        handle = self._handle_of.pop(req_id, None)
        if handle is None:
            return
        del self._name_of[handle]
        self._unanswered.pop(handle, None)
        if num_output > 0:
            self._send(protocol.finished(handle, num_output, is_cut))
        else:
            self._send(protocol.gone(handle))

    def forget_but(self, req_ids: Iterable[str]) -> None:
        """All other requests have ended unseen; nothing is learned from them."""
        for req_id in self._handle_of.keys() - set(req_ids):
            self.ended(req_id, 0, is_cut=False)

    def poll(self) -> list[Answer]:
        """Answers since the last call, at most 32 packets of them; call it at every step."""
        if self._socket is None:
            if not self._has_failed and not self._is_closed and self._clock() >= self._start_at_s:
                self._start()
            return []
        if self._backlog:
            self._send_backlog()
        answers = list(self._read())
        if self._unanswered and self._socket is not None:
            self._check_time()
        return answers

    def close(self) -> None:
        """End the process; harmless when there is none."""
        self._is_closed = True
        process = self._process
        self._disconnect()
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends when the socket does
            process.wait(_STOP_TIMEOUT_S)
            return
        process.kill()
        process.wait()

    # Inside ---------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no more files may be open
            self._lost(f"it could not be started: {error}")
            return
        for each in (mine, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        mine.setblocking(False)
        argument = json.dumps({"fd": theirs.fileno(), "settings": asdict(self.settings)})
        environment = os.environ | {
            # One thread each, and no start-up work that belongs to the engine.
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            # Not multiprocessing: vLLM's engine is a daemon there, which may have no children.
            self._process = subprocess.Popen(
                [*self._command, argument],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            mine.close()
            self._lost(f"it could not be started: {error}")
            return
        finally:
            theirs.close()
        self._socket = mine
        self._started_s = self._clock()
        self._is_ready = False

    def _send(self, packet: bytes) -> None:
        # Without a process it is kept for the next one: requests may well still wait when it is up.
        if self._socket is not None and not self._backlog:
            try:
                self._socket.send(packet, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost(f"its socket: {error}")
        self._backlog.append(packet)

    def _send_backlog(self) -> None:
        for _ in range(min(MAX_PER_CALL, len(self._backlog))):
            if self._socket is None:
                return
            try:
                self._socket.send(self._backlog[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(f"its socket: {error}")
                return
            self._backlog.popleft()

    def _read(self) -> Iterator[Answer]:
        for _ in range(MAX_PER_CALL):
            if self._socket is None:
                return
            try:
                packet = self._socket.recv(protocol.MAX_PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(f"its socket: {error}")
                return
            kind = packet[:1]
            if kind == protocol.ANSWER:
                self._heard_s = self._clock()
                for handle, prediction in protocol.parse_answers(packet):
                    self._unanswered.pop(handle, None)
                    name = self._name_of.get(handle)
                    if name is None:
                        self.counts["num_late"] += 1
                    else:
                        self.counts["num_answered"] += 1
                        yield name, prediction
            elif kind == protocol.READY:
                self._is_ready = True
                self._ready_s = self._clock()
                logger.info(
                    "sola_sched: predictor %r ready after %.1f s",
                    self.settings.kind,
                    self._clock() - self._started_s,
                )
            elif kind == protocol.FAILED:
                self._has_failed = True
                logger.warning(
                    "sola_sched: no %r predictions, lengths come from the histogram. %s",
                    self.settings.kind,
                    packet[1:].decode(errors="replace"),
                )
                process = self._process
                self._disconnect()
                self._forget_all()
                if process is not None:
                    _reap(process)
                return
            else:
                self._lost("it ended")
                return

    def _check_time(self) -> None:
        now = self._clock()
        if not self._is_ready:
            if now - self._started_s > _START_TIMEOUT_S:
                self._lost(f"not ready after {_START_TIMEOUT_S:g} s")
            return
        while self._unanswered:
            handle, sent_s = next(iter(self._unanswered.items()))
            since_s = max(sent_s, self._ready_s)
            if now - since_s <= _ANSWER_TIMEOUT_S:
                return
            if self._heard_s <= since_s:
                self._lost(f"no answer for {now - since_s:.0f} s")
                return
            # It has answered others since: the question, or the answer, was dropped in a burst.
            del self._unanswered[handle]

    def _lost(self, reason: str) -> None:
        """The process is gone or useless: the next one starts when the back-off is over."""
        now = self._clock()
        if self._is_ready and now - self._started_s > _HEALTHY_AFTER_S:
            self._back_off_s = _FIRST_BACK_OFF_S
        self._start_at_s = now + self._back_off_s
        logger.warning(
            "sola_sched: lost the predictor process (%s); lengths come from the histogram, next "
            "start in %g s",
            reason,
            self._back_off_s,
        )
        self._back_off_s = min(_LONGEST_BACK_OFF_S, 2.0 * self._back_off_s)
        self.counts["num_restarts"] += 1
        self.counts["num_unanswered_at_restart"] += len(self._unanswered)
        self._unanswered.clear()
        process = self._process
        self._disconnect()
        if process is not None:
            process.kill()
            _reap(process)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._process = None
        self._is_ready = False

    def _forget_all(self) -> None:
        self._handle_of.clear()
        self._name_of.clear()
        self._unanswered.clear()
        self._backlog.clear()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Take in the end of a process that is on its way out, without waiting for it here."""
    threading.Thread(target=process.wait, daemon=True, name="sola_sched reaper").start()


def make_client(config: SolaConfig, model_config: Any) -> PredictionClient | None:
    """The client that a configuration asks for, or None for the histogram alone.

    Args:
        config: Names the predictor and its file.
        model_config: vLLM's: names the tokenizer.
    """
    if config.predictor == "histogram":
        return None
    return PredictionClient(
        ServiceSettings(
            kind=config.predictor,
            tokenizer=str(model_config.tokenizer),
            path=None if config.predictor_path is None else str(config.predictor_path),
            encoder=None if config.predictor_encoder is None else str(config.predictor_encoder),
            save_s=config.predictor_save_s,
            tokenizer_revision=model_config.tokenizer_revision,
            trust_remote_code=bool(model_config.trust_remote_code),
        )
    )
