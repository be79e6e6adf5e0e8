"""Builds a predictor from prompts with known output lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.corpus import Corpus
from sola_sched.length_predictor.lexical.features import count_matrix, describe
from sola_sched.length_predictor.lexical.lexical import LexicalModel
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.retrieval.decoder import train_decoder
from sola_sched.length_predictor.retrieval.index import DEFAULT_CAPACITY, NeighbourStore
from sola_sched.length_predictor.retrieval.predictor import (
    Encoder,
    RetrievalPredictor,
    Vectors,
    prompt_key,
)

#: Called with the name of the stage, what is done and what there is to do.
Report = Callable[[str, int, int], None]
#: Prompts that it takes to train a decoder; fewer are left to the words and the neighbours.
MIN_FOR_DECODER = 200
_ENCODED_AT_ONCE = 512


def _silent(stage: str, done: int, total: int) -> None:
    pass


def build_lexical(corpus: Corpus) -> LexicalPredictor:
    """Fit the lexical model."""
    model = LexicalModel()
    model.fit([describe(prompt) for prompt in corpus.prompts], corpus.lengths)
    return LexicalPredictor(model)


def encode_all(encoder: Encoder, corpus: Corpus, report: Report = _silent) -> Vectors:
    """Vectors of all prompts [n, dim]."""
    vectors = np.empty((len(corpus), encoder.dim), dtype=np.float32)
    # Sorted, so that a batch holds texts of one length.
    order = np.argsort([len(prompt) for prompt in corpus.prompts], kind="stable")
    for start in range(0, len(order), _ENCODED_AT_ONCE):
        report("encode", start, len(order))
        chosen = order[start : start + _ENCODED_AT_ONCE]
        vectors[chosen] = encoder.encode([corpus.prompts[place] for place in chosen.tolist()])
    report("encode", len(order), len(order))
    return vectors


def build_retrieval(
    corpus: Corpus,
    encoder: Encoder,
    *,
    capacity: int = DEFAULT_CAPACITY,
    seed: int = 0,
    vectors: Vectors | None = None,
    report: Report = _silent,
) -> RetrievalPredictor:
    """Fit the lexical model, train the decoder and fill the store.

    Args:
        corpus: Prompts and lengths; of more than ``capacity`` the last are stored.
        encoder: Makes the vectors.
        capacity: Most entries of the store.
        seed: Of the decoder's training.
        vectors: Vectors of the prompts [n, dim] if they are known already.
        report: Told about progress.
    """
    if vectors is None:
        vectors = encode_all(encoder, corpus, report)
    features = [describe(prompt) for prompt in corpus.prompts]
    lexical = LexicalModel()
    expected: NDArray[np.float64] = lexical.fit(features, corpus.lengths)
    counts = count_matrix(features)
    decoder = None
    if len(corpus) >= MIN_FOR_DECODER:
        report("train", 0, 1)
        decoder = train_decoder(vectors, counts, corpus.lengths, seed=seed)
        report("train", 1, 1)
        expected = (expected + decoder.quantiles(vectors, counts).mean(axis=1)) / 2.0
    store = NeighbourStore(encoder.dim, capacity=capacity)
    values = np.stack([np.log(corpus.lengths), expected], axis=1)
    keys = np.array([prompt_key(prompt) for prompt in corpus.prompts], dtype=np.uint64)
    store.add(vectors[-capacity:], values[-capacity:], keys[-capacity:])
    store.num_evicted = 0
    return RetrievalPredictor(encoder, store, lexical, decoder)
