"""Training for tests that do not look at how well a decoder has learned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def short_training() -> Iterator[None]:
    """A tenth of the steps that a small set gets, which take seconds."""
    decoder = pytest.importorskip("sola_sched.length_predictor.retrieval.decoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_MIN_STEPS", 40)
        yield
