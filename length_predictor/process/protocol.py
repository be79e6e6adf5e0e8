"""Messages between a scheduler and its predictor process: one packet each, no pickle.

A packet is one letter and fixed-size little-endian fields. Sockets are Unix sequential packets:
whole messages, in order, bounded by the kernel's buffer, and an end of file when the other side
dies.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.prediction.length import NUM_LEVELS, SOURCES, LengthPrediction

#: Scheduler to process: a request arrives, has ended by itself, or is gone without a length.
ARRIVED, FINISHED, GONE = b"A", b"F", b"X"
#: Process to scheduler: it is ready, it has an answer, or it can never work (with the reason).
READY, ANSWER, FAILED = b"R", b"P", b"E"

#: Tokens of a prompt that travel, half from each end.
MAX_TOKENS = 384
MAX_PACKET = 4096

_ARRIVED = struct.Struct("<cQI")
_FINISHED = struct.Struct("<cQI?")
_GONE = struct.Struct("<cQ")
_ANSWER = struct.Struct(f"<QB{NUM_LEVELS}f")
#: Answers in one packet, at most.
MAX_ANSWERS = 64


@dataclass(frozen=True)
class ServiceSettings:
    """What the process needs to know; plain data.

    Attributes:
        kind: ``lexical`` or ``retrieval``.
        tokenizer: Name or folder of the model's tokenizer.
        path: Predictor file; None starts from nothing.
        encoder: Sentence encoder, for ``retrieval``; None is the default one.
        save_s: Seconds between two writes of what was learned to ``path``; 0 never writes.
        tokenizer_revision, trust_remote_code: As vLLM's own options.
        niceness: Added to the process's niceness.
    """

    kind: str
    tokenizer: str
    path: str | None = None
    encoder: str | None = None
    save_s: float = 0.0
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    niceness: int = 19


def arrived(handle: int, token_ids: Sequence[int]) -> bytes:
    """A request with this prompt, or the two ends of it."""
    size = len(token_ids)
    if size > MAX_TOKENS:
        half = MAX_TOKENS // 2
        token_ids = [*token_ids[:half], *token_ids[-half:]]
    return _ARRIVED.pack(ARRIVED, handle, size) + array("i", token_ids).tobytes()


def parse_arrived(packet: bytes) -> tuple[int, int, list[int]]:
    """Handle, tokens of the whole prompt, token ids that travelled."""
    _, handle, size = _ARRIVED.unpack_from(packet)
    ids = array("i")
    ids.frombytes(packet[_ARRIVED.size :])
    return handle, size, ids.tolist()


def finished(handle: int, num_output: int, is_cut: bool) -> bytes:
    """A request ended with so many tokens, at its limit or (``is_cut`` False) by itself."""
    return _FINISHED.pack(FINISHED, handle, num_output, is_cut)


def parse_finished(packet: bytes) -> tuple[int, int, bool]:
    """Handle, output tokens, whether the limit ended it."""
    _, handle, num_output, is_cut = _FINISHED.unpack(packet)
    return handle, num_output, is_cut


def gone(handle: int) -> bytes:
    """A request was aborted; nothing is to be learned from it."""
    return _GONE.pack(GONE, handle)


def parse_gone(packet: bytes) -> int:
    """Handle."""
    handle: int = _GONE.unpack(packet)[1]
    return handle


def answers(pairs: Sequence[tuple[int, LengthPrediction]]) -> bytes:
    """Handles and predictions, at most ``MAX_ANSWERS``; quantiles travel in single precision."""
    return ANSWER + b"".join(
        _ANSWER.pack(handle, SOURCES.index(each.source), *each.quantiles.tolist())
        for handle, each in pairs
    )


def parse_answers(packet: bytes) -> list[tuple[int, LengthPrediction]]:
    """Inverse of ``answers``."""
    return [
        (handle, LengthPrediction(np.array(quantiles), SOURCES[source]))
        for handle, source, *quantiles in _ANSWER.iter_unpack(packet[1:])
    ]
