"""Made-up prompts whose output length follows from their words; an encoder without a network."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.corpus import Corpus

#: Task words and the output tokens they ask for.
TASKS = {"list": 40, "explain": 160, "write": 500, "name": 6, "translate": 25}
TOPICS = ("rivers", "stars", "bread", "music", "birds", "metal", "rain", "paper", "maps", "salt")


def make_corpus(count: int, *, seed: int = 0, factor: float = 1.0, name: str = "made up") -> Corpus:
    """`count` distinct prompts; the spread of a length around its task's is a factor of e^0.2."""
    rng = np.random.default_rng(seed)
    prompts, lengths = [], []
    for number in range(count):
        task = str(rng.choice(list(TASKS)))
        topic, other = rng.choice(TOPICS, 2).tolist()
        prompts.append(f"{task} something about {topic} and {other}, number {number} please")
        lengths.append(max(1, round(factor * TASKS[task] * float(np.exp(rng.normal(0.0, 0.2))))))
    return Corpus(name, tuple(prompts), np.array(lengths))


class WordEncoder:
    """Unit vectors from hashed words: equal words, similar vectors."""

    dim = 32
    identity = "words-32"
    num_bytes = 0

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_encoded += len(texts)
        result = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                seed = zlib.crc32(word.encode())
                result[row] += np.random.default_rng(seed).normal(size=self.dim)
        norms = np.maximum(np.linalg.norm(result, axis=1, keepdims=True), 1e-6)
        return np.asarray(result / norms, dtype=np.float32)
