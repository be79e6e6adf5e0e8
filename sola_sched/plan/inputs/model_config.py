"""The sizes of any model from its `config.json`: a file, a folder, or a name in the local cache.

What decides step times and memory must be in it and must be what the formulas are for: dense
layers or experts in every layer, keys and values for each head, weights of 16 bits. Anything else
is refused by name, since a wrong size would be a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sola_sched.config.rules import nearest, shown
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.roofline import MODELS, Model

#: Names of one size in the files of different models.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
    "max_model_len": (
        "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
    ),
}  # fmt: skip
_MLP = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
#: Models of text inside of others.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
#: Their MLP has two matrices; that of others a gate besides.
_WITHOUT_GATE = (
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nemotron", "opt", "phi", "starcoder2",
)  # fmt: skip
#: Of these input and output embedding are one matrix unless the file says otherwise.
_TIED = ("bloom", "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST = 2**40


def read_model(name: str) -> tuple[Model, tuple[str, ...]]:
    """The sizes of a model, and what is not exact about them, in sentences.

    Args:
        name: One of the package, a `config.json`, a folder that holds one, or the name of a model
            that is in the local Hugging Face cache.

    Raises:
        ConfigError: There is none, or its sizes cannot be used.
    """
    if name in MODELS:
        return MODELS[name], ()
    path = _file_of(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be readable JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object (got {shown(config)}).")
    return model_of(config, name, str(path))


def _file_of(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"'--model' must be a folder with a config.json (got {name}).")
    if path.is_file():
        return path
    found = _cached(name)
    if found is None:
        near = nearest(name, MODELS)
        advice = (
            f"write {near}, or download its config.json" if near else "download its config.json"
        )
        raise ConfigError(
            f"'--model' must be one of {', '.join(sorted(MODELS))}, a config.json or its folder "
            f"that is there, or a model in the local Hugging Face cache (got {name!r}); {advice}."
        )
    return found


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def model_of(config: Mapping[str, Any], name: str, where: str) -> tuple[Model, tuple[str, ...]]:
    """The sizes in the content of a `config.json`; otherwise as `read_model`."""
    notes = []
    inner = next((key for key in _INNER if isinstance(config.get(key), Mapping)), None)
    if inner is not None:
        notes.append(f"Of {name} only the text model is counted, not what reads images or sound.")
        # A quantisation is told outside.
        config = {k: v for k, v in config.items() if k == "quantization_config"} | config[inner]
    config = _with_defaults(config)
    _refuse(config, where)
    sizes = {key: _count(config, names, where) for key, names in _NAMES.items()}
    kv_heads = _kv_heads(config, sizes["num_heads"], where)
    head_size = _optional(config, ("head_dim",), where)
    if head_size is None and sizes["hidden_size"] % sizes["num_heads"]:
        raise ConfigError(
            f"{where} must name 'head_dim', or 'hidden_size' must be a multiple of the heads (got "
            f"{sizes['hidden_size']} and {sizes['num_heads']})."
        )
    mlp, stored = _mlp(config, sizes["hidden_size"], where)
    if stored is not None:
        notes.append(f"All experts of {name} are taken to be read in every step.")
    if _is_sliding(config):
        notes.append(f"Sliding windows of {name} are counted as if they had no end.")
    kind = str(config.get("model_type", ""))
    model = Model(
        name=name,
        intermediate_size=mlp,
        stored_mlp_size=stored,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_matrices=2 if kind in _WITHOUT_GATE else 3,
        is_tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        **sizes,
    )
    return model, tuple(notes)


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the file leaves out because it is usual for the kind of model, where that is known."""
    needed = (*_NAMES.values(), _MLP)
    kind = config.get("model_type")
    if all(any(config.get(name) for name in names) for names in needed) or not kind:
        return config
    try:
        from transformers import AutoConfig

        given = {key: value for key, value in config.items() if key != "model_type"}
        return {**AutoConfig.for_model(str(kind), **given).to_dict(), **config}
    except Exception:  # whatever these classes raise: the missing key is named instead
        return config


def _refuse(config: Mapping[str, Any], where: str) -> None:
    """What the formulas are not for.

    Raises:
        ConfigError: It is one of these.
    """
    kinds = config.get("layer_types") or []
    others = sorted({str(k) for k in kinds} - {_FULL, _SLIDING}) if isinstance(kinds, list) else []
    rules = (
        ("kv_lora_rank", "have keys and values for each head, not latent ones (MLA)"),
        ("quantization_config", "be of weights of 16 bits, not quantised ones"),
        ("compression_config", "be of weights of 16 bits, not compressed ones"),
        ("is_encoder_decoder", "be of a model without an encoder"),
        ("mamba_d_state", "have attention in every layer"),
        ("state_size", "have attention in every layer"),
        ("ssm_cfg", "have attention in every layer"),
        ("hybrid_override_pattern", "have attention in every layer"),
        ("attn_layer_period", "have attention in every layer"),
        ("linear_num_key_heads", "have attention in every layer"),
        ("mlp_only_layers", "have experts in every layer or in none"),
        ("first_k_dense_replace", "have experts in every layer or in none"),
    )
    for key, rule in rules:
        if config.get(key):
            raise ConfigError(
                f"{where} must {rule} (got '{key}': {shown(config[key])}); plan knows neither "
                "memory nor step times of such models."
            )
    if others:
        raise ConfigError(
            f"{where} must have attention in every layer (got 'layer_types' with "
            f"{', '.join(others)}); plan knows neither memory nor step times of such models."
        )
    for key in ("decoder_sparse_step", "interleave_moe_layer_step"):
        if config.get(key, 1) != 1:
            raise ConfigError(
                f"{where} must have experts in every layer or in none (got '{key}': "
                f"{shown(config[key])}); plan knows neither memory nor step times of such models."
            )


def _kv_heads(config: Mapping[str, Any], num_heads: int, where: str) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    given = _optional(config, ("num_key_value_heads", "num_kv_heads", "n_head_kv"), where)
    heads = given or num_heads
    if num_heads % heads:
        raise ConfigError(
            f"{where} must have as many heads as a multiple of those of keys and values (got "
            f"{num_heads} and {heads})."
        )
    return heads


def _mlp(config: Mapping[str, Any], hidden: int, where: str) -> tuple[int, int | None]:
    """Width of the MLP that a token goes through, and of all experts together, if there are."""
    experts = _optional(config, _EXPERTS, where)
    if experts is None:
        given = _optional(config, _MLP, where)
        if given is None and config.get("model_type") in ("bloom", "falcon", "gpt2", "gptj"):
            return 4 * hidden, None
        return given or _count(config, _MLP, where), None
    width = _optional(config, ("moe_intermediate_size",), where) or _count(config, _MLP, where)
    of_a_token = _count(config, _EXPERTS_OF_A_TOKEN, where)
    if of_a_token > experts:
        raise ConfigError(
            f"{where} must have no more experts for a token than there are (got {of_a_token} of "
            f"{experts})."
        )
    shared = _optional(config, ("shared_expert_intermediate_size",), where) or 0
    shared += width * (_optional(config, ("n_shared_experts",), where) or 0)
    return of_a_token * width + shared, experts * width + shared


def _is_sliding(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return _SLIDING in kinds
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _count(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    found = _optional(config, names, where)
    if found is None:
        raise ConfigError(
            f"{where} must hold '{names[0]}', a whole number >= 1 (got none); add it."
        )
    return found


def _optional(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            raise ConfigError(
                f"{where}: '{name}' must be a whole number >= 1 (got {shown(value)})."
            )
        if value:
            return value
    return None
