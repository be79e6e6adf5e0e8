"""Compares predictors on a fixed split: in domain, across data sets, after some live traffic."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import DatasetError
from sola_sched.length_predictor.building import (
    MIN_FOR_DECODER,
    Report,
    build_lexical,
    build_retrieval,
    encode_all,
)
from sola_sched.length_predictor.corpus import Corpus
from sola_sched.length_predictor.evaluation.scoring import score
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.length_predictor.lexical.features import count_matrix, describe
from sola_sched.length_predictor.lexical.lexical import LexicalModel
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.retrieval.embed import SentenceEncoder
from sola_sched.length_predictor.retrieval.index import NeighbourStore
from sola_sched.length_predictor.retrieval.predictor import (
    Encoder,
    RetrievalPredictor,
    Vectors,
)
from sola_sched.prediction.length import LEVELS, NUM_LEVELS

FloatArray = NDArray[np.float64]

PREDICTORS = (
    "histogram", "lexical", "decoder", "algorithm-1", "retrieval", "proxy", "retrieval-tuned"
)  # fmt: skip
#: Those that fine-tune the encoder, for minutes.
TRAINS_ENCODER = frozenset({"proxy", "retrieval-tuned"})
NEEDS_ENCODER = frozenset(PREDICTORS) - {"histogram", "lexical"}
#: Prompts whose single predictions are timed.
NUM_TIMED = 300
_NO_LIMIT = 2**17
_CHARS_PER_TOKEN = 4


class Contender(Protocol):
    """A predictor under test."""

    def quantiles(self, corpus: Corpus) -> FloatArray:
        """Lengths at ``LEVELS`` [n, 10]."""

    def learn(self, corpus: Corpus) -> None:
        """Take in finished requests one after the other, as in serving."""

    def one(self, text: str) -> None:
        """Predict a single prompt from its text, as in serving; timed."""

    @property
    def num_bytes(self) -> int:
        """Memory of weights and store."""


@dataclass
class Histogram:
    """SOLA's histogram: prompt length only. A prompt of c characters counts as c / 4 tokens."""

    histogram: LengthHistogram

    def quantiles(self, corpus: Corpus) -> FloatArray:
        classes = np.array([self._class(text) for text in corpus.prompts], dtype=np.int32)
        none = np.zeros(len(corpus), dtype=np.int64)
        limit = np.full(len(corpus), _NO_LIMIT)
        return np.stack(
            [self.histogram.remaining_quantile(q, classes, none, limit) for q in LEVELS], axis=1
        )

    def learn(self, corpus: Corpus) -> None:
        for text, length in zip(corpus.prompts, corpus.lengths.tolist(), strict=True):
            self.histogram.observe(self._class(text), length)

    def one(self, text: str) -> None:
        row = np.array([self._class(text)], dtype=np.int32)
        self.histogram.remaining(row, np.array([0]), np.array([_NO_LIMIT]))

    @property
    def num_bytes(self) -> int:
        return 224 * 16 * (1 + self.histogram.num_classes)

    def _class(self, text: str) -> int:
        return self.histogram.class_of(len(text) // _CHARS_PER_TOKEN, _NO_LIMIT)


@dataclass
class Served:
    """A predictor as it serves: batches of 16, learning as it goes."""

    predictor: LexicalPredictor | RetrievalPredictor

    def quantiles(self, corpus: Corpus) -> FloatArray:
        result = [np.empty((0, NUM_LEVELS))]
        for batch in _batches(corpus.prompts):
            result += [answer.quantiles[None] for answer in self.predictor.predict(batch)]
        return np.concatenate(result)

    def learn(self, corpus: Corpus) -> None:
        lengths = corpus.lengths.tolist()
        for number, batch in enumerate(_batches(corpus.prompts)):
            pending = self.predictor.consider(batch)[1]
            done = lengths[16 * number : 16 * number + len(batch)]
            self.predictor.learn(pending, done, [False] * len(batch))

    def one(self, text: str) -> None:
        self.predictor.predict([text])

    @property
    def num_bytes(self) -> int:
        predictor = self.predictor
        if isinstance(predictor, LexicalPredictor):
            return sum(array.nbytes for array in predictor.model.to_arrays().values())
        parts = [*predictor.lexical.model.to_arrays().values()]
        if predictor.decoder is not None:
            parts += predictor.decoder.to_arrays().values()
        weights = int(getattr(predictor.encoder, "num_bytes", 0))
        return sum(array.nbytes for array in parts) + predictor.store.num_bytes + weights


@dataclass
class Alone:
    """Parts of the retrieval predictor by themselves: the decoder, or Algorithm 1 as printed."""

    predictor: RetrievalPredictor
    is_algorithm_1: bool

    def quantiles(self, corpus: Corpus) -> FloatArray:
        counts = count_matrix([describe(text) for text in corpus.prompts])
        return self._answer(encode_all(self.predictor.encoder, corpus), counts)

    def learn(self, corpus: Corpus) -> None:
        if not self.is_algorithm_1:
            return  # the paper trains its decoder once
        vectors = encode_all(self.predictor.encoder, corpus)
        logs = np.log(corpus.lengths)
        keys = np.arange(len(corpus), dtype=np.uint64) + np.uint64(2**63)
        self.predictor.store.add(vectors, np.stack([logs, logs], axis=1), keys)

    def one(self, text: str) -> None:
        self._answer(self.predictor.encoder.encode([text]), count_matrix([describe(text)]))

    @property
    def num_bytes(self) -> int:
        whole = Served(self.predictor).num_bytes
        return whole if self.is_algorithm_1 else whole - self.predictor.store.num_bytes

    def _answer(self, vectors: Vectors, counts: NDArray[Any]) -> FloatArray:
        assert self.predictor.decoder is not None
        if self.is_algorithm_1:
            lengths = self.predictor.algorithm_1(vectors, counts)
            return np.repeat(lengths[:, None], NUM_LEVELS, axis=1)
        return np.exp(self.predictor.decoder.quantiles(vectors, counts))


@dataclass
class Proxy:
    """The fine-tuned encoder; see `proxy`."""

    model: Any

    def quantiles(self, corpus: Corpus) -> FloatArray:
        result: FloatArray = self.model.quantiles(corpus.prompts)
        return result

    def learn(self, corpus: Corpus) -> None:
        pass

    def one(self, text: str) -> None:
        self.model.quantiles([text])

    @property
    def num_bytes(self) -> int:
        return int(self.model.num_bytes)


def make(
    name: str,
    corpus: Corpus,
    encoder: Encoder | None,
    *,
    vectors: Vectors | None = None,
    proxy_seconds: float = 300.0,
    report: Report = lambda *_: None,
) -> Contender:
    """Train one of ``PREDICTORS`` on a corpus."""
    if name == "histogram":
        histogram = Histogram(LengthHistogram(memory=10**6))
        histogram.learn(corpus)
        return histogram
    if name == "lexical":
        return Served(build_lexical(corpus))
    if name in TRAINS_ENCODER:
        model = _trained(corpus, proxy_seconds, report)
        if name == "proxy":
            return Proxy(model)
        with tempfile.TemporaryDirectory() as folder:
            tuned = SentenceEncoder(model.save_encoder(Path(folder)))
        return Served(build_retrieval(corpus, tuned, report=report))
    assert encoder is not None
    predictor = build_retrieval(corpus, encoder, vectors=vectors, report=report)
    if name != "retrieval" and predictor.decoder is None:
        raise DatasetError(
            f"Predictor {name!r} needs a decoder, which takes at least {MIN_FOR_DECODER} training "
            f"prompts (got {len(corpus)}); leave it out."
        )
    return Served(predictor) if name == "retrieval" else Alone(predictor, name == "algorithm-1")


@functools.lru_cache(maxsize=1)
def _trained(corpus: Corpus, seconds: float, report: Report) -> Any:
    from sola_sched.length_predictor.evaluation.proxy import ProxyModel

    model = ProxyModel()
    model.fit(corpus, seconds=seconds, report=report)
    return model


def copy_of(contender: Contender) -> Contender:
    """A copy that learns on its own, where the contender learns at all."""
    if isinstance(contender, Histogram):
        return Histogram(copy.deepcopy(contender.histogram))
    if not isinstance(contender, Served | Alone):
        return contender
    old = contender.predictor
    if isinstance(old, LexicalPredictor):
        return Served(LexicalPredictor(LexicalModel.from_arrays(old.model.to_arrays())))
    new = RetrievalPredictor(
        old.encoder,
        NeighbourStore.from_arrays(old.store.to_arrays()),
        LexicalModel.from_arrays(old.lexical.model.to_arrays()),
        old.decoder,
    )
    if isinstance(contender, Alone):
        return Alone(new, contender.is_algorithm_1)
    return Served(new)


def evaluate(
    name: str, contender: Contender, test: Corpus, *, trained_on: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Two rows of one predictor on one test corpus: as it was trained, and after live traffic.

    Args:
        name: Of the predictor.
        contender: Trained; left as it is.
        test: What to predict; disjoint from the training prompts.
        trained_on: Name of the training corpus.
        seed: Draws the requests that finish, and are learned from, before the second row. They
            are scored in neither.
    """
    first, rest = warm_up_split(test, seed)
    about = {"predictor": name, "trained_on": trained_on, "tested_on": test.name}
    rows = [{**about, "num_learned": 0, **asdict(score(contender.quantiles(rest), rest.lengths))}]
    learning = copy_of(contender)
    learning.learn(first)
    quantiles = learning.quantiles(rest)
    rows.append({**about, "num_learned": len(first), **asdict(score(quantiles, rest.lengths))})
    return rows


#: Requests of a test corpus that may be learned from; never scored.
WARM_UP = 200


def warm_up_split(corpus: Corpus, seed: int) -> tuple[Corpus, Corpus]:
    """Requests to learn from, at most a third of the corpus, and those to be scored."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    size = min(WARM_UP, len(corpus) // 3)
    return corpus.take(order[:size]), corpus.take(np.sort(order[size:]))


def latency_ms(
    one: Callable[[str], None], prompts: Sequence[str], num_timed: int = NUM_TIMED
) -> tuple[float, float]:
    """Median and 99th percentile of single predictions, after a few to warm up."""
    chosen = prompts[:num_timed]
    for text in chosen[:10]:
        one(text)
    times = []
    for text in chosen:
        start = time.perf_counter()
        one(text)
        times.append(time.perf_counter() - start)
    low, high = np.quantile(times, [0.5, 0.99]) * 1e3
    return float(low), float(high)


def _batches(prompts: Sequence[str], size: int = 16) -> list[Sequence[str]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
