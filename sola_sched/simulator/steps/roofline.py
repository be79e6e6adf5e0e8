"""Computes the profiles of the package: `python -m sola_sched.simulator.steps.roofline`.

No step here was measured. Peaks are the vendor's; the shares of them that a serving engine gets
are assumptions, the same for every model, and stated in each file.

Per GPU, with t GPUs in tensor parallel, h the hidden size, W the bytes of all weights but the
input embedding, P the parameters of the layers, and FLOP/s, bytes/s already times efficiency:

    base_s              host + layers * (launch + 2 all-reduce latencies if t > 1)
    weights_s           W / t / HBM bytes/s
    per_token_s         2 P / t / FLOP/s
    per_decode_s        2 h vocabulary / t / FLOP/s + all-reduce + elementwise
    per_ctx_s           KV bytes of a token / t / HBM bytes/s
    per_prefill_token_s all-reduce + elementwise
    per_prefill_attn_s  4 layers heads head_dim / t / FLOP/s
    all-reduce          2 layers * 2 (t - 1) / t * 2 h bytes / link bytes/s (ring), 0 if t = 1
    elementwise         layers * bytes of norms, rotary embedding, activation / HBM bytes/s

The files of the package keep `Assumptions()`, on which stored results rest: assumed shares,
and no elementwise work. `corrected` has shares that were fitted to measured kernels, `--corrected`
writes files with them, for what nobody has measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sola_sched.simulator.steps.gpus import GPUS, Gpu
from sola_sched.simulator.steps.profile import FOLDER, FORMAT, VERSION

_BYTES = 2  # of a weight, an activation and a KV element: bf16, or fp16 on V100
_GIB = 2**30
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Model:
    """Sizes of a model, from its `config.json`.

    Attributes:
        tensor_parallel: GPUs it is served on.
        mlp_matrices: 3 with a gate, 2 without.
        is_tied: Output layer and input embedding are one matrix.
        head_size: Elements of a head; None for `hidden_size` / `num_heads`.
        stored_mlp_size: Of experts the widths of all together, `intermediate_size` being that of
            those that a token goes through; None without experts.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_model_len: int
    tensor_parallel: int = 1
    mlp_matrices: int = 3
    is_tied: bool = False
    head_size: int | None = None
    stored_mlp_size: int | None = None

    @property
    def layer_parameters(self) -> int:
        """Matrices of all layers; biases, norms and routers (< 0.1 %) are left out."""
        return self._layers(self.stored_mlp_size or self.intermediate_size)

    @property
    def token_parameters(self) -> int:
        """Those of `layer_parameters` that a token is multiplied with."""
        return self._layers(self.intermediate_size)

    def _layers(self, mlp_size: int) -> int:
        heads = self.num_heads + self.num_kv_heads
        attention = 2 * self.hidden_size * heads * self.head_dim
        return self.num_layers * (attention + self.mlp_matrices * self.hidden_size * mlp_size)

    @property
    def embedding_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.layer_parameters + (1 if self.is_tied else 2) * self.embedding_parameters

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def gpu_heads(self) -> int:
        """Query heads on one GPU."""
        return self.num_heads // self.tensor_parallel

    @property
    def gpu_kv_heads(self) -> int:
        """KV heads on one GPU; with fewer heads than GPUs, each is on several."""
        return max(1, self.num_kv_heads // self.tensor_parallel)

    def unshared(self, degree: int) -> str:
        """What so many GPUs cannot share, so that vLLM does not start on them; empty if nothing."""
        kv = self.num_kv_heads
        if self.num_heads % degree:
            return f"{self.num_heads} heads"
        if kv % degree and degree % kv:
            return f"{kv} heads of keys and values"
        # Of experts only the width of several together is known.
        if self.stored_mlp_size is None and self.intermediate_size % degree:
            return f"an MLP of width {self.intermediate_size}"
        return ""

    @property
    def layer_products(self) -> list[tuple[int, int]]:
        """(Output, input width) on one GPU of QKV, attention output, MLP up (and gate), down."""
        inner = self.intermediate_size // self.tensor_parallel
        heads = self.gpu_heads * self.head_dim
        return [
            (heads + 2 * self.gpu_kv_heads * self.head_dim, self.hidden_size),
            (self.hidden_size, heads),
            ((self.mlp_matrices - 1) * inner, self.hidden_size),
            (self.hidden_size, inner),
        ]

    @property
    def elementwise_bytes(self) -> int:
        """Bytes that a token moves on one GPU beside matrix products and attention, in a layer.

        Two norms that add the residual (two vectors read, two written), rotary embedding and KV
        write (read and written), activation (all but the down projection's input read, that
        written).
        """
        norms = 2 * 4 * self.hidden_size
        rotary = 2 * (self.gpu_heads + self.gpu_kv_heads) * self.head_dim
        kv = 2 * 2 * self.gpu_kv_heads * self.head_dim
        activation = self.mlp_matrices * self.intermediate_size // self.tensor_parallel
        return _BYTES * (norms + rotary + kv + activation)

    @property
    def kv_bytes_per_token(self) -> int:
        """On one GPU: keys and values of all layers, heads shared out."""
        return 2 * self.num_layers * self.gpu_kv_heads * self.head_dim * _BYTES


@dataclass(frozen=True)
class Assumptions:
    """What an engine gets of the peaks, and what it costs beside them."""

    compute_efficiency: float = 0.55
    hbm_efficiency: float = 0.80
    link_efficiency: float = 0.75
    all_reduce_latency_s: float = 10e-6
    launch_s_per_layer: float = 20e-6
    host_s: float = 0.5e-3
    memory_utilization: float = 0.90
    reserved_bytes: float = 3e9
    overlap_power: float = 0.0
    has_elementwise: bool = False


_WHY = {
    "compute_efficiency": "share of the tensor-core peak in prefill; assumed",
    "hbm_efficiency": "share of the memory bandwidth in decode; assumed",
    "link_efficiency": "share of the NVLink bandwidth in a ring all-reduce; assumed",
    "all_reduce_latency_s": "of one all-reduce, however small; assumed",
    "launch_s_per_layer": "gaps between the kernels of a layer in a CUDA graph; assumed",
    "host_s": "input preparation and sampling per step; assumed",
    "memory_utilization": "vLLM's gpu_memory_utilization",
    "reserved_bytes": "activations, CUDA graphs and context; assumed",
}
_WHY_CORRECTED = {
    "compute_efficiency": "share of the tensor-core peak; fitted to kernels of A100 and H100",
    "hbm_efficiency": "share of the memory bandwidth; fitted to kernels of A100 and H100",
}

MODELS = {
    "llama-3-8b": Model("meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": Model(
        "meta-llama/Meta-Llama-3-70B", 8192, 28672, 80, 64, 8, 128256, 8192, tensor_parallel=4
    ),
    "qwen1.5-14b": Model(
        "Qwen/Qwen1.5-14B", 5120, 13696, 40, 40, 40, 152064, 32768, tensor_parallel=2
    ),
    "qwen1.5-72b": Model(
        "Qwen/Qwen1.5-72B", 8192, 24576, 80, 64, 64, 152064, 32768, tensor_parallel=4
    ),
    "opt-13b": Model(
        "facebook/opt-13b", 5120, 20480, 40, 40, 40, 50272, 2048, mlp_matrices=2, is_tied=True
    ),
    "vicuna-7b-16k": Model("lmsys/vicuna-7b-v1.5-16k", 4096, 11008, 32, 32, 32, 32000, 16384),
}
"""By the first part of a profile's name."""

#: Shares of compute and memory peaks with the least mean error of steps of the six models against
#: measured kernels, `overlap_power` 2 (`benchmarks/fidelity/gpu_steps.py` prints what is left).
_FITTED = {"a100": (0.80, 0.71), "h100": (0.77, 0.84)}


def corrected(gpu_key: str) -> Assumptions:
    """What measured kernels say; for a GPU of which there are none, the mean of the others."""
    shares = zip(*_FITTED.values(), strict=True)
    compute, memory = _FITTED.get(gpu_key) or [sum(both) / len(both) for both in shares]
    return Assumptions(
        compute_efficiency=compute, hbm_efficiency=memory, overlap_power=2.0, has_elementwise=True
    )


def num_blocks(model: Model, gpu: Gpu, assumed: Assumptions) -> int:
    """KV blocks that fit beside the weights; < 1 if those leave no room."""
    usable = assumed.memory_utilization * gpu.memory_gib * _GIB
    weights = model.num_parameters * _BYTES / model.tensor_parallel
    room = usable - weights - assumed.reserved_bytes
    return int(room // (model.kv_bytes_per_token * _BLOCK_SIZE))


def fits(model: Model, gpu: Gpu, assumed: Assumptions) -> bool:
    """Whether one request of full length fits beside the weights."""
    # vLLM keeps a block for itself.
    return num_blocks(model, gpu, assumed) - 1 >= -(-model.max_model_len // _BLOCK_SIZE)


def step_time(model: Model, gpu: Gpu, assumed: Assumptions) -> dict[str, tuple[float, str]]:
    """Each coefficient of `StepTimeModel` in seconds, and how it follows."""
    gpus = model.tensor_parallel
    flops = gpu.flops * assumed.compute_efficiency * gpus
    hbm = gpu.hbm_bytes_per_s * assumed.hbm_efficiency
    layers, hidden = model.num_layers, model.hidden_size
    read_bytes = _BYTES * (model.layer_parameters + model.embedding_parameters)
    reduce_s, latency_s = 0.0, 0.0
    if gpus > 1:
        link = gpu.link_bytes_per_s * assumed.link_efficiency
        reduce_s = 2 * layers * (2 * (gpus - 1) / gpus) * _BYTES * hidden / link
        latency_s = 2 * layers * assumed.all_reduce_latency_s
    elementwise_s = 0.0
    if assumed.has_elementwise:
        elementwise_s = layers * model.elementwise_bytes / hbm
    ring = f"2 x {layers} ring all-reduces of {_BYTES * hidden} bytes over {gpus} GPUs"
    launch_s = layers * assumed.launch_s_per_layer
    beside = [ring] if gpus > 1 else []
    if assumed.has_elementwise:
        beside.append(f"{layers} x {model.elementwise_bytes} bytes of elementwise work")
    coefficients = {
        "base_s": (
            assumed.host_s + launch_s + latency_s,
            f"host, launches of {layers} layers"
            + (f", latency of 2 x {layers} all-reduces" if gpus > 1 else ""),
        ),
        "per_decode_s": (
            2 * model.embedding_parameters / flops + reduce_s + elementwise_s,
            "; ".join(["output layer, 2 x hidden_size x vocab_size FLOP", *beside]),
        ),
        "per_ctx_s": (model.kv_bytes_per_token / hbm, "KV of one token read from HBM"),
        "per_prefill_token_s": (
            reduce_s + elementwise_s,
            "; ".join(beside) or "one GPU: no all-reduce",
        ),
        "per_prefill_attn_s": (
            4 * layers * model.num_heads * model.head_dim / flops,
            "4 x num_layers x hidden_size FLOP per pair of tokens",
        ),
        "weights_s": (
            read_bytes / gpus / hbm,
            f"{read_bytes / 1e9:.4g} GB of weights (all but the input embedding) read from HBM",
        ),
        "per_token_s": (
            2 * model.token_parameters / flops,
            f"2 x {model.token_parameters / 1e9:.4g}e9 FLOP in the layers",
        ),
    }
    if assumed.overlap_power:
        why = "how reading weights and computing overlap, fitted to kernels of A100 and H100"
        coefficients["overlap_power"] = (assumed.overlap_power, why)
    return coefficients


def make_profile(
    model_key: str,
    gpu_key: str,
    assumed: Assumptions | None = None,
    tensor_parallel: int | None = None,
) -> dict[str, Any]:
    """The content of `<model_key>-<gpu_key>.json`, or of the model on another number of GPUs."""
    model = on_gpus(MODELS[model_key], tensor_parallel)
    return profile_document(f"{model_key}-{gpu_key}", model, GPUS[gpu_key], assumed)


def profile_document(
    name: str, model: Model, gpu: Gpu, assumed: Assumptions | None = None
) -> dict[str, Any]:
    """The same for any model, on as many GPUs of any kind as it names."""
    assumed = assumed or Assumptions()
    document = _described(name, model, gpu, assumed)
    engine = document.pop("engine")
    document["step_time"] = {
        name: {
            "value": float(f"{value:.4g}"),
            "unit": "s" if name.endswith("_s") else "1",
            "from": why,
        }
        for name, (value, why) in step_time(model, gpu, assumed).items()
    }
    return document | {"engine": engine}


def on_gpus(model: Model, tensor_parallel: int | None) -> Model:
    """The model on so many GPUs; None for its usual number."""
    return model if tensor_parallel is None else replace(model, tensor_parallel=tensor_parallel)


def describe(
    model_key: str,
    gpu_key: str,
    assumed: Assumptions | None = None,
    tensor_parallel: int | None = None,
) -> dict[str, Any]:
    """The same without step times: model, hardware, and the memory of the engine."""
    model = on_gpus(MODELS[model_key], tensor_parallel)
    return _described(f"{model_key}-{gpu_key}", model, GPUS[gpu_key], assumed or Assumptions())


def _described(name: str, model: Model, gpu: Gpu, assumed: Assumptions) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "origin": "roofline, computed and not measured: "
        "python -m sola_sched.simulator.steps.roofline",
        "model": {
            "name": model.name,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "vocab_size": model.vocab_size,
            "num_parameters": model.num_parameters,
            "bytes_per_parameter": _BYTES,
            "from": "the model's config.json",
        },
        "hardware": {
            "gpu": gpu.name,
            "num_gpus": model.tensor_parallel,
            "flops": gpu.flops,
            "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
            "link_bytes_per_s": gpu.link_bytes_per_s,
            "memory_gib": gpu.memory_gib,
            "from": f"{gpu.source}; memory as CUDA reports it",
        },
        "assumptions": {
            name: {"value": getattr(assumed, name), "from": why}
            for name, why in (_WHY | (_WHY_CORRECTED if assumed.overlap_power else {})).items()
        },
        "engine": {
            "tensor_parallel": model.tensor_parallel,
            "max_model_len": model.max_model_len,
            "block_size": _BLOCK_SIZE,
            "num_blocks": {
                "value": num_blocks(model, gpu, assumed),
                "from": "memory x memory_utilization - weights - reserved, per GPU",
            },
            "kv_bytes_per_token": {
                "value": model.kv_bytes_per_token,
                "from": "keys and values of all layers, per GPU",
            },
            "pcie_bytes_per_s": {"value": round(gpu.pcie_bytes_per_s), "from": "one direction"},
        },
    }


def make_profiles(*, is_corrected: bool = False) -> tuple[dict[str, str], list[str]]:
    """The text of every profile by name, and the names left out because they do not fit."""
    texts, left_out = {}, []
    for model_key, model in MODELS.items():
        for gpu_key, gpu in GPUS.items():
            name = f"{model_key}-{gpu_key}"
            if fits(model, gpu, Assumptions()):
                assumed = corrected(gpu_key) if is_corrected else None
                profile = make_profile(model_key, gpu_key, assumed)
                texts[name] = json.dumps(profile, indent=1) + "\n"
            else:
                left_out.append(name)
    return texts, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Write all profiles; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sola_sched.simulator.steps.roofline",
        description="Compute the simulator's profiles from public hardware figures.",
    )
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument(
        "--corrected", action="store_true", help="with shares fitted to measured kernels"
    )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.output
    if arguments.corrected and folder == FOLDER:
        parser.error("--corrected needs --output: stored results rest on the package's files.")
    folder.mkdir(parents=True, exist_ok=True)
    texts, left_out = make_profiles(is_corrected=arguments.corrected)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"Wrote {len(texts)} profiles to {folder}.")
    print(f"Left out, one full-length request does not fit in memory: {', '.join(left_out)}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
