"""Writes a random-weight Llama directory, so that a real engine runs without a download.

Only the configuration and a tokenizer are written; vLLM makes the weights up
(``load_format="dummy"``).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sola_sched.bench.backends.environment import has_accelerator
from sola_sched.config.cache_dir import user_cache_dir
from sola_sched.errors import ConfigError

#: Format of the directory; raise it when the files written below change.
_FORMAT = 1
_SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
#: KV cache of the random model in bfloat16: 32k tokens, at its scale of 1/4 what an 8B model has on
#: 40 GB.
_RANDOM_MODEL_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelShape:
    """Architecture of the random model.

    The default was picked by measuring, on one core of a bf16-capable x86 server, a model whose
    decode step at batch 1 costs as much as prefilling about 65 tokens (4.5 ms against
    14,600 tokens/s): an 8B model on a data-centre GPU is near 100. Attention is light (2 KV
    heads) and the vocabulary large for this reason: the output head is read once per
    step and is not computed for prompt tokens, so it weighs on decode as the weights do on a GPU.

    Attributes:
        max_model_len: Longest prompt + output the model accepts, tokens.
        dtype: ``bfloat16`` for speed, ``float32`` for exact comparisons.
    """

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    vocab_size: int = 98304
    max_model_len: int = 2048
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        minimum = 256 + len(_SPECIAL_TOKENS)
        if self.vocab_size < minimum:
            raise ConfigError(
                f"'vocab_size' must be >= {minimum} to hold every byte (got {self.vocab_size})."
            )
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "'num_heads' must divide 'hidden_size' and be a multiple of 'num_kv_heads' "
                f"(got {self.num_heads}, {self.hidden_size}, {self.num_kv_heads})."
            )

    @property
    def name(self) -> str:
        """Short name for tables and results."""
        return f"random-llama-{self.num_parameters / 1e6:.0f}M"

    @property
    def num_parameters(self) -> int:
        """Weights, with the input embedding and the output head shared."""
        kv_size = self.hidden_size * self.num_kv_heads // self.num_heads
        attention = 2 * self.hidden_size * (self.hidden_size + kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * (attention + mlp) + norms + self.vocab_size * self.hidden_size


#: Default model of the benchmark, 62 M parameters.
BENCH_SHAPE = ModelShape()
#: For tests: starts and steps in milliseconds, same tokens whatever the batch.
TINY_SHAPE = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=512,
    max_model_len=512,
    dtype="float32",
)


def write_model(directory: Path, shape: ModelShape = BENCH_SHAPE) -> Path:
    """Write ``config.json``, the tokenizer and the generation settings into ``directory``.

    The directory appears in one piece or not at all.

    Raises:
        ConfigError: ``directory`` exists and is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"The model directory must be new or empty (got {directory}, which holds files); "
            "name another one."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".model-", dir=directory.parent))
    try:
        _write_json(staging / "config.json", _model_config(shape))
        _write_json(
            staging / "generation_config.json",
            {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False},
        )
        _write_tokenizer(staging, shape)
        staging.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def cached_model(shape: ModelShape = BENCH_SHAPE, cache_dir: Path | None = None) -> Path:
    """Return the directory of ``shape`` in the user's cache, written on first use."""
    size = f"h{shape.hidden_size}x{shape.num_layers}-v{shape.vocab_size}"
    name = f"{shape.name}-{size}-{shape.max_model_len}-{shape.dtype}-{_FORMAT}"
    directory = (cache_dir or user_cache_dir()) / "models" / name
    if (directory / "config.json").exists():
        return directory
    try:
        return write_model(directory, shape)
    except OSError as error:
        if (directory / "config.json").exists():  # another process was faster
            return directory
        raise ConfigError(
            f"The model cache must be writable (got {directory}: {error.strerror}); "
            "set XDG_CACHE_HOME to a folder you can write."
        ) from error


def random_engine_args(dtype: str | None = None) -> dict[str, Any]:
    """Engine arguments with which the random model is run.

    Args:
        dtype: Of the model; by default the faster one here: a CPU without AVX-512 computes prompts
            in bfloat16 several times as slowly as in float32.
    """
    if dtype is None:
        dtype = "bfloat16"
        if not has_accelerator():
            import torch

            if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
                dtype = "float32"
    kv_bytes = _RANDOM_MODEL_KV_BYTES * (2 if dtype in ("float", "float32") else 1)
    return {"dtype": dtype, "kv_cache_memory_bytes": kv_bytes, "max_num_seqs": 128}


def _model_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _write_tokenizer(directory: Path, shape: ModelShape) -> None:
    """Byte-level tokenizer: text is split into single bytes, the other ids decode to words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = ("Ġ" + "".join(w) for w in itertools.product(string.ascii_lowercase, repeat=4))
    tokens += itertools.islice(words, shape.vocab_size - len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": shape.max_model_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
            "{% endfor %}assistant: ",
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
