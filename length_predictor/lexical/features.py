"""What can be read off a prompt in microseconds: hashed words and word pairs, and a few counts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

#: Words and pairs share this many buckets; fewer cost accuracy (see the folder's README).
NUM_BUCKETS = 2**18
NUM_COUNTS = 8
#: Only this much of a prompt is read: its head, and its tail if it is longer.
MAX_CHARS = 1536
_MAX_WORDS = 256
# The first words ("Write", "List", "What") say more than the same words elsewhere.
_NUM_PLACED = 3
# Scripts without spaces count by the character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+|\d+|[^\w\s]")


@dataclass(frozen=True)
class PromptFeatures:
    """Features of one prompt.

    Attributes:
        buckets: Distinct buckets of its words and word pairs, int64, ascending.
        counts: Logarithms of counts [8], float32: characters, words, lines, digits, questions,
            paragraphs, commas, characters after the first paragraph.
    """

    buckets: NDArray[np.int64]
    counts: FloatArray


def head_and_tail(text: str, max_chars: int = MAX_CHARS) -> str:
    """The two ends of a long text, together ``max_chars``."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} {text[-half:]}"


def describe(text: str, num_chars: int | None = None) -> PromptFeatures:
    """Read the features of a prompt; about 40 µs for 20 words.

    Args:
        text: The prompt or its two ends.
        num_chars: Length of the whole prompt if ``text`` is a part of it.
    """
    total = len(text) if num_chars is None else num_chars
    text = head_and_tail(text)
    words = _WORD.findall(text.lower())
    if len(words) > _MAX_WORDS:
        words = [*words[: _MAX_WORDS // 2], *words[-(_MAX_WORDS // 2) :]]
    buckets = set()
    before = 1
    for place, word in enumerate(words):
        data = word.encode("utf-8", "surrogatepass")
        single = zlib.crc32(data)
        buckets.add(single % NUM_BUCKETS)
        buckets.add(zlib.crc32(data, before) % NUM_BUCKETS)
        if place < _NUM_PLACED:
            buckets.add(zlib.crc32(data, place + 2) % NUM_BUCKETS)
        before = single
    paragraphs = text.split("\n\n", 1)
    counts = np.log1p(
        np.array(
            [
                total,
                len(words) * max(1.0, total / max(1, len(text))),
                text.count("\n"),
                sum(map(str.isdigit, text)),
                text.count("?"),
                text.count("\n\n"),
                text.count(","),
                len(paragraphs[1]) if len(paragraphs) > 1 else 0,
            ],
            dtype=np.float32,
        )
    )
    return PromptFeatures(np.array(sorted(buckets), dtype=np.int64), counts)


def count_matrix(features: Sequence[PromptFeatures]) -> FloatArray:
    """The counts of many prompts [n, 8]."""
    if not features:
        return np.empty((0, NUM_COUNTS), dtype=np.float32)
    return np.stack([each.counts for each in features])


def word_matrix(features: Sequence[PromptFeatures]) -> scipy.sparse.csr_matrix:
    """Bag of words and pairs [n, NUM_BUCKETS]; each row has length one."""
    sizes = np.array([len(each.buckets) for each in features], dtype=np.int64)
    columns = (
        np.concatenate([each.buckets for each in features])
        if len(features)
        else np.empty(0, dtype=np.int64)
    )
    values = np.repeat(1.0 / np.sqrt(np.maximum(sizes, 1)), sizes).astype(np.float32)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return scipy.sparse.csr_matrix((values, columns, ends), shape=(len(features), NUM_BUCKETS))
