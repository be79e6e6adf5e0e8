"""A random Llama of 0.3 M parameters whose greedy output depends on the whole context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
#: Weights are this many times larger than usual, so that attention is far from uniform.
_GAIN = 2.5


def write_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write `config.json` and fp32 weights of the model; returns `folder`.

    Args:
        overrides: Entries of `config.json` that change the shape of no layer.
    """
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_size = hidden * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return write_random_model(folder, CONFIG | overrides, shapes, seed=seed)


def write_random_model(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
    norms: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Path:
    """Write `config.json` and fp32 weights of a decoder; returns `folder`.

    Args:
        shapes: Of each layer's matrices, by name.
        norms: Sizes of norms of each layer, beside the two that all have.
    """
    import torch
    from safetensors.torch import save_file

    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(vocab_size, hidden, 1.0),
    }
    sizes = {"input_layernorm": hidden, "post_attention_layernorm": hidden, **(norms or {})}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = normal(rows, columns, _GAIN)
        for name, size in sizes.items():
            weights[f"{prefix}.{name}.weight"] = torch.ones(size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter with random weights on the query projections; returns `folder`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, rank = CONFIG["hidden_size"], 8
    weights = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Add a byte-level tokenizer, so that the model can be served over HTTP."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_MODEL_LEN,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=1))
