"""Output length from similar past prompts, and from what two models expect.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1 and Algorithm 1: embed the prompt, take the
top k stored prompts with similarity above s_0, answer with the similarity-weighted average of their
lengths, or with an MLP if there is none; store every finished request. Departures, each measured in
`benchmarks/predictor/README.md`:

- The answer is a distribution. Its ten quantiles are weighted quantiles of the neighbours.
- A neighbour says by what factor its length differed from what the models had expected of *it*, and
  the prompt's own expectation is moved by that factor. Neighbours are rarely close enough for
  their plain lengths to be the better guess. The models are the decoder and the lexical one;
  their log-quantiles are averaged.
- No jump at s_0: the models' own distribution counts as a few neighbours more.
- Level and spread of the models are corrected from the requests that finished last.
`RetrievalPredictor.algorithm_1` is the paper's rule to the letter, for comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.calibration import Recalibration
from sola_sched.length_predictor.lexical.features import PromptFeatures, count_matrix, describe
from sola_sched.length_predictor.lexical.lexical import LexicalModel
from sola_sched.length_predictor.lexical.lexical_predictor import (
    LexicalPredictor,
    Pending,
    predictions,
)
from sola_sched.length_predictor.retrieval.decoder import Decoder
from sola_sched.length_predictor.retrieval.index import NeighbourStore
from sola_sched.prediction.length import LEVELS, NUM_LEVELS, LengthPrediction

FloatArray = NDArray[np.float64]
Vectors = NDArray[np.float32]

#: Neighbours asked for, k, and least similarity, s_0. Chosen on Alpaca, see the README.
NUM_NEIGHBOURS = 32
MIN_SIMILARITY = 0.4
# A neighbour weighs exp(8 (s - 1)): 1 if identical, 1/5 at 0.8, 1/120 at s_0.
_SHARPNESS = 8.0
# The models' own distribution weighs as one identical prompt.
_OWN_WEIGHT = 1.0
_MIN_NEIGHBOUR_MASS = 0.01


class Encoder(Protocol):
    """Text to unit vectors; `embed.SentenceEncoder` or a stand-in for tests."""

    dim: int
    identity: str

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors [n, dim]."""


def prompt_key(text: str, num_chars: int | None = None) -> int:
    """Hash of an exact prompt, the same in every process."""
    data = text.encode("utf-8", "surrogatepass") + str(num_chars or len(text)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def weighted_quantiles(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Quantiles at ``LEVELS`` of weighted samples, row by row.

    The smallest value at which the weights up to it reach the level's share of their sum.

    Args:
        values: Samples [n, m], m >= 1.
        weights: Weights [n, m], >= 0; of each row one is positive.

    Returns:
        Quantiles [n, 10], ascending.
    """
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    mass = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    targets = mass[:, -1:] * (np.array(LEVELS) * (1.0 - 1e-12))
    places = (mass[:, :, None] < targets[:, None, :]).sum(axis=1)
    result: FloatArray = np.take_along_axis(ordered, places, axis=1)
    return result


class RetrievalPredictor:
    """Algorithm 1 of ALISE as this package runs it; see the module for the departures.

    Args:
        encoder: Makes the vectors; its identity must be the one the decoder was trained with.
        store: Past prompts, with log-length and the models' mean log-length as values.
        lexical: The lexical model.
        decoder: The MLP, or None before ``build`` has trained one.
    """

    kind = "retrieval"

    def __init__(
        self,
        encoder: Encoder,
        store: NeighbourStore | None = None,
        lexical: LexicalModel | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.encoder = encoder
        self.store = store if store is not None else NeighbourStore(encoder.dim)
        self.lexical = LexicalPredictor(lexical)
        self.decoder = decoder
        self.recalibration = Recalibration()
        self.num_encoder_skips = 0

    def predict(
        self, texts: Sequence[str], num_chars: Sequence[int] | None = None
    ) -> list[LengthPrediction]:
        """Predict prompts; ``num_chars`` are their true lengths if the texts are cut."""
        return self.consider(texts, num_chars)[0]

    def consider(
        self, texts: Sequence[str], num_chars: Sequence[int] | None = None
    ) -> tuple[list[LengthPrediction], list[Pending]]:
        """Predict prompts, and return with each answer what ``learn`` needs later."""
        sizes = [len(text) for text in texts] if num_chars is None else num_chars
        if not len(texts):
            return [], []
        features = [describe(text, size) for text, size in zip(texts, sizes, strict=True)]
        keys = [prompt_key(text, size) for text, size in zip(texts, sizes, strict=True)]
        vectors = self.vectors(texts, keys)
        raw, sources = self.aggregate(self.expectation(features, vectors), vectors)
        pending = [
            Pending(each, vector, key)
            for each, vector, key in zip(features, vectors, keys, strict=True)
        ]
        return predictions(raw, sources), pending

    def vectors(self, texts: Sequence[str], keys: Sequence[int]) -> Vectors:
        """Vectors [n, dim]; a prompt that is in the store is not encoded again."""
        result = np.empty((len(texts), self.encoder.dim), dtype=np.float32)
        missing = []
        for row, key in enumerate(keys):
            known = self.store.vector_of(key)
            if known is None:
                missing.append(row)
            else:
                result[row] = known
        if missing:
            result[missing] = self.encoder.encode([texts[row] for row in missing])
        self.num_encoder_skips += len(texts) - len(missing)
        return result

    def expectation(self, features: Sequence[PromptFeatures], vectors: Vectors) -> FloatArray:
        """What the models alone expect: log-quantiles [n, 10]."""
        words = self.lexical.model.quantiles(features)
        if self.decoder is None:
            return words
        return (words + self.decoder.quantiles(vectors, count_matrix(features))) / 2.0

    def aggregate(self, base: FloatArray, vectors: Vectors) -> tuple[FloatArray, list[str]]:
        """Search and aggregation: log-quantiles [n, 10] and what each rests on.

        With neighbours i of similarity s_i >= s_0, log-length l_i and expected log-length b_i, the
        samples are ``b + l_i - b_i`` with weights ``exp(8 (s_i - 1))`` and the ten recalibrated
        quantiles of the models with 0.1 each, where b is the mean of the models' quantiles.
        Without a decoder the models are too fresh to be measured by, and the samples are ``l_i``.
        """
        similarity, slots = self.store.search(vectors, NUM_NEIGHBOURS)
        weights = np.exp(_SHARPNESS * (similarity.astype(np.float64) - 1.0))
        weights[similarity < MIN_SIMILARITY] = 0.0
        stored = np.nan_to_num(self.store.values[slots].astype(np.float64))
        samples = stored[:, :, 0]
        if self.decoder is not None:
            samples = samples + base.mean(axis=1, keepdims=True) - stored[:, :, 1]
        near = weights.sum(axis=1) > _MIN_NEIGHBOUR_MASS
        own = np.full(base.shape, _OWN_WEIGHT / NUM_LEVELS)
        quantiles = weighted_quantiles(
            np.hstack([samples, self.recalibration.apply(base)]), np.hstack([weights, own])
        )
        without = "lexical" if self.decoder is None else "decoder"
        return quantiles, ["neighbours" if is_near else without for is_near in near]

    def learn(
        self, pending: Sequence[Pending], lengths: Sequence[int], is_cut: Sequence[bool]
    ) -> None:
        """Take in finished requests, in one update of the store; as `LexicalPredictor.learn`."""
        vectors = np.stack([each.vector for each in pending if each.vector is not None])
        if len(vectors) < len(pending):
            raise ValueError("'pending' must come from this predictor's consider().")
        by_decoder = None
        if self.decoder is not None:
            counts = count_matrix([each.features for each in pending])
            by_decoder = self.decoder.quantiles(vectors, counts)
        kept, values = [], []
        for row, each in enumerate(pending):
            expected = self.lexical.learn_one(each.features, lengths[row], is_cut=is_cut[row])
            if expected is None:
                continue
            if by_decoder is not None:
                expected = (expected + by_decoder[row]) / 2.0
            log_length = float(np.log(lengths[row]))
            self.recalibration.observe(expected, log_length)
            kept.append(row)
            values.append((log_length, float(expected.mean())))
        if kept:
            keys = np.array([pending[row].key for row in kept], dtype=np.uint64)
            self.store.add(vectors[kept], np.array(values), keys)

    def algorithm_1(
        self, vectors: Vectors, counts: NDArray[Any], *, min_similarity: float = MIN_SIMILARITY
    ) -> FloatArray:
        """Algorithm 1 of the paper to the letter: one length [n] for each vector.

        Its sum of similarity times length is read as an average: normalized by the similarities.
        """
        similarity, slots = self.store.search(vectors, NUM_NEIGHBOURS)
        weights = np.where(similarity >= min_similarity, similarity, 0.0).astype(np.float64)
        lengths = np.exp(np.nan_to_num(self.store.values[slots, 0].astype(np.float64)))
        mass = weights.sum(axis=1)
        result: FloatArray = (weights * lengths).sum(axis=1) / np.maximum(mass, 1e-9)
        alone = mass <= 0.0
        if alone.any() and self.decoder is not None:
            quantiles = self.decoder.quantiles(vectors[alone], counts[alone])
            result[alone] = np.exp(quantiles).mean(axis=1)
        return result
