"""A random DeepSeek-V2 with latent attention (MLA) and plain MLPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_llama import MAX_MODEL_LEN, VOCAB_SIZE

_HIDDEN, _INNER, _HEADS, _LAYERS = 128, 256, 4, 2
#: The one latent size that vLLM's CPU kernel takes.
_LATENT, _ROPE = 512, 64
_HEAD = 32
#: As of the tiny Llama: attention is far from uniform.
_GAIN = 2.5

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "moe_intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "kv_lora_rank": _LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": _HEAD,
    "qk_rope_head_dim": _ROPE,
    "v_head_dim": _HEAD,
    "n_routed_experts": 4,  # of layers that this model does not have
    "first_k_dense_replace": _LAYERS,
    "moe_layer_freq": 1,
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


def write_tiny_deepseek(folder: Path, seed: int = 0) -> Path:
    """Write `config.json` and fp32 weights of the model; returns `folder`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": normal(VOCAB_SIZE, _HIDDEN, 1.0),
    }
    shapes = {
        "self_attn.q_proj": (_HEADS * (_HEAD + _ROPE), _HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (_LATENT + _ROPE, _HIDDEN),
        "self_attn.kv_b_proj": (_HEADS * 2 * _HEAD, _LATENT),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    norms = {
        "input_layernorm": _HIDDEN,
        "post_attention_layernorm": _HIDDEN,
        "self_attn.kv_a_layernorm": _LATENT,
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = normal(rows, columns, _GAIN)
        for name, size in norms.items():
            weights[f"{prefix}.{name}.weight"] = torch.ones(size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
