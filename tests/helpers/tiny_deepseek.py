"""A random DeepSeek-V2 with latent attention (MLA) and plain MLPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_llama

_HIDDEN, _INNER = tiny_llama.CONFIG["hidden_size"], tiny_llama.CONFIG["intermediate_size"]
_HEADS, _LAYERS = 4, tiny_llama.CONFIG["num_hidden_layers"]
#: The one latent size that vLLM's CPU kernel takes.
_LATENT, _ROPE = 512, 64
_HEAD = 32

CONFIG: dict[str, Any] = tiny_llama.CONFIG | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "moe_intermediate_size": _INNER,
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
}
_SHAPES = {
    "self_attn.q_proj": (_HEADS * (_HEAD + _ROPE), _HIDDEN),
    "self_attn.kv_a_proj_with_mqa": (_LATENT + _ROPE, _HIDDEN),
    "self_attn.kv_b_proj": (_HEADS * 2 * _HEAD, _LATENT),
    "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
    "mlp.gate_proj": (_INNER, _HIDDEN),
    "mlp.up_proj": (_INNER, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INNER),
}


def write_tiny_deepseek(folder: Path) -> Path:
    """Write `config.json` and fp32 weights of the model; returns `folder`."""
    norms = {"self_attn.kv_a_layernorm": _LATENT}
    return tiny_llama.write_random_model(folder, CONFIG, _SHAPES, norms)
