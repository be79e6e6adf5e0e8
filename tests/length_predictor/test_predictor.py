"""Retrieval predictor: weighted quantiles, what neighbours add, learning, the paper's rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompts import WordEncoder, make_corpus

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.length_predictor.building import build_retrieval
from sola_sched.length_predictor.evaluation.scoring import score
from sola_sched.length_predictor.lexical.features import count_matrix, describe
from sola_sched.length_predictor.retrieval.decoder import Decoder, train_decoder
from sola_sched.length_predictor.retrieval.index import NeighbourStore
from sola_sched.length_predictor.retrieval.predictor import (
    MIN_SIMILARITY,
    RetrievalPredictor,
    weighted_quantiles,
)
from sola_sched.prediction.length import LEVELS


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=12
    ).filter(lambda pairs: sum(weight for _, weight in pairs) > 0)
)
def test_weighted_quantiles_equal_those_of_repeated_samples(
    samples: list[tuple[int, int]],
) -> None:
    values = np.array([[value for value, _ in samples]], dtype=float)
    weights = np.array([[weight for _, weight in samples]], dtype=float)
    repeated = np.sort(np.repeat(values[0], weights[0].astype(int)))

    found = weighted_quantiles(values, weights)[0]

    # By definition: the smallest value that at least a share p of the samples does not exceed.
    for level, value in zip(LEVELS, found, strict=True):
        share = np.mean(repeated <= value)
        below = np.mean(repeated < value)
        assert share >= level - 1e-9
        assert below < level + 1e-9
    assert (np.diff(found) >= 0).all()


@pytest.fixture(scope="module")
def trained() -> RetrievalPredictor:
    return build_retrieval(make_corpus(600, seed=1), WordEncoder(), capacity=500)


def test_built_predictor_finds_lengths_and_rests_on_neighbours(trained: RetrievalPredictor) -> None:
    test = make_corpus(100, seed=2)

    answers = trained.predict(test.prompts)

    figures = score(np.array([answer.quantiles for answer in answers]), test.lengths)
    assert figures.median_relative_error < 0.3
    assert figures.kendall_tau > 0.75
    assert {answer.source for answer in answers} == {"neighbours"}
    assert len(trained.store) == 500
    trained.store.check_integrity()


def test_prompt_without_a_neighbour_is_answered_by_the_decoder(
    trained: RetrievalPredictor,
) -> None:
    text = "zzz qqq xxx yyy"
    similarity, _ = trained.store.search(trained.encoder.encode([text]), 1)
    assert similarity[0, 0] < MIN_SIMILARITY

    assert trained.predict([text])[0].source == "decoder"


def test_neighbours_move_the_answer_by_their_error_not_to_their_length() -> None:
    encoder = WordEncoder()
    corpus = make_corpus(250)
    predictor = build_retrieval(corpus, encoder)
    predictor.store = NeighbourStore(encoder.dim, capacity=50)
    prompt = "tell me of the sea"
    before = predictor.predict([prompt])[0].median
    vector = encoder.encode([prompt])
    expected = predictor.expectation([describe(prompt)], vector).mean()
    # Twenty alike, each three times as long as had been expected.
    values = np.full((16, 2), expected)
    values[:, 0] += np.log(3.0)
    predictor.store.add(np.repeat(vector, 16, axis=0), values, np.arange(16, dtype=np.uint64))

    answer = predictor.predict([prompt])[0]

    assert answer.source == "neighbours"
    assert answer.median == pytest.approx(3.0 * np.exp(expected), rel=0.01)
    assert answer.median > 2.0 * before


def test_exact_repeat_is_not_encoded_again_and_dominates() -> None:
    encoder = WordEncoder()
    predictor = RetrievalPredictor(encoder, NeighbourStore(encoder.dim, capacity=50))
    prompt = "count to one hundred"
    for _ in range(12):
        _, pending = predictor.consider([prompt])
        predictor.learn(pending, [290], [False])

    answer = predictor.predict([prompt])[0]

    assert encoder.num_encoded == 1
    assert predictor.num_encoder_skips == 12
    assert answer.median == pytest.approx(290, rel=0.35)
    assert predictor.store.num_of(predictor.consider([prompt])[1][0].key) == 12


def test_live_traffic_of_another_model_moves_the_level() -> None:
    predictor = build_retrieval(make_corpus(400, seed=1), WordEncoder(), capacity=1000)
    live, test = make_corpus(200, seed=5, factor=3.0), make_corpus(80, seed=6, factor=3.0)

    before = np.array([answer.quantiles for answer in predictor.predict(test.prompts)])
    for start in range(0, 200, 20):
        _, pending = predictor.consider(live.prompts[start : start + 20])
        predictor.learn(pending, live.lengths[start : start + 20].tolist(), [False] * 20)
    after = np.array([answer.quantiles for answer in predictor.predict(test.prompts)])

    assert score(before, test.lengths).relative_error > 0.5
    assert score(after, test.lengths).relative_error < 0.35


def test_algorithm_1_averages_by_similarity_and_asks_the_decoder_otherwise() -> None:
    encoder = WordEncoder()
    near, far = encoder.encode(["a b c d", "e f g h"])
    side = np.asarray(near + 0.5 * far, dtype=np.float32)
    side /= np.linalg.norm(side)
    store = NeighbourStore(encoder.dim, capacity=10)
    store.add(
        np.stack([near, side]), np.log([[100.0, 1.0], [200.0, 1.0]]), np.arange(2, dtype=np.uint64)
    )
    decoder = train_decoder(near[None], np.zeros((1, 8), np.float32), np.array([50]))
    predictor = RetrievalPredictor(encoder, store, decoder=decoder)

    lengths = predictor.algorithm_1(
        np.stack([near, -near]), np.zeros((2, 8), np.float32), min_similarity=0.5
    )

    similar = float(near @ side)
    assert lengths[0] == pytest.approx((100 + 200 * similar) / (1 + similar), rel=0.01)
    alone = np.exp(decoder.quantiles(-near[None], np.zeros((1, 8), np.float32))).mean()
    assert lengths[1] == pytest.approx(alone)


def test_decoder_learns_a_length_from_a_vector_and_keeps_its_quantiles_in_order() -> None:
    corpus, encoder = make_corpus(800, seed=1), WordEncoder()
    vectors = encoder.encode(corpus.prompts)
    counts = count_matrix([describe(prompt) for prompt in corpus.prompts])

    decoder = train_decoder(vectors, counts, corpus.lengths)
    quantiles = decoder.quantiles(vectors, counts)
    again = Decoder.from_arrays(decoder.to_arrays()).quantiles(vectors, counts)

    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert score(np.exp(quantiles), corpus.lengths).kendall_tau > 0.6
    np.testing.assert_array_equal(again, quantiles)


def test_no_prompts_give_no_answers(trained: RetrievalPredictor) -> None:
    assert trained.predict([]) == []
