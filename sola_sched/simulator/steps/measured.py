"""Builds the measured profiles: `python -m sola_sched.simulator.steps.measured --data DIR`.

What vLLM's kernels take on a GPU, operator by operator and measured by others (`kernels`), is
put together to whole steps of a model: over the tokens of a step, with t GPUs in tensor parallel,

    layers * (4 matrix products + 2 all-reduces if t > 1 + elementwise work),

the output layer over its requests, and attention apart for decodes and for chunks (`StepTables`).

Measured: matrix products, attention, all-reduces. Not measured: elementwise work (norms, rotary
embedding, activation, KV write: their bytes at a share of the memory bandwidth, and launches), the
host's part of a step, and chunks of a prompt that has begun, which count by their pairs of tokens.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from sola_sched.simulator.steps import roofline
from sola_sched.simulator.steps.gpus import GPUS, Gpu
from sola_sched.simulator.steps.kernels import Curve, FloatArray, KernelTables, monotone
from sola_sched.simulator.steps.profile import FOLDER
from sola_sched.simulator.steps.roofline import MODELS, Model
from sola_sched.simulator.steps.tables import SECTION, StepTables

#: GPUs of which there are tables.
MEASURED_GPUS = ("a100", "h100")
SUFFIX = "measured"

_DECODE_REQUESTS = 2.0 ** np.arange(10)  # 1 to 512
_DECODE_CONTEXT = 2.0 ** np.arange(8, 22)  # 256 to 2,097,152 tokens
_PAIR_KNOTS = 0.5 * 4.0 ** np.arange(8, 15)  # of single prompts of 256 to 16,384 tokens
# Of prompts in one step, and of requests with an output: what no engine exceeds by much.
_MAX_PROMPT_TOKENS, _MAX_OUTPUTS = 32768, 1024
_SOURCE = {
    "from": "github.com/ai-dynamo/aiconfigurator at 095f58a51c4ca8e61b66ec108d86f223f8d559ce, "
    "aic-core/src/aiconfigurator_core/systems/data (gemm, attention, custom_allreduce and nccl "
    "tables of a100_sxm and h100_sxm); clocks, driver and power limit are not recorded",
    "by": "NVIDIA, with the kernels of vLLM 0.14.0 (A100-SXM4-80GB) and 0.24.0 (H100-80GB-HBM3)",
    "licence": "Apache-2.0",
}


@dataclass(frozen=True)
class Beside:
    """What a step costs beside the measured kernels; assumed."""

    host_s: float = 0.5e-3
    hbm_efficiency: float = 0.80
    launch_s_per_layer: float = 10e-6
    max_graph_tokens: int = 512


_WHY = {
    "host_s": "input preparation and sampling per step; assumed",
    "hbm_efficiency": "share of the memory bandwidth in elementwise work; assumed",
    "launch_s_per_layer": "launches of a layer's elementwise kernels in a CUDA graph; assumed",
    "max_graph_tokens": "largest CUDA graph of vLLM's defaults, min(2 x max_num_seqs, 512)",
}


def build(
    kernels: KernelTables, model: Model, gpu: Gpu, beside: Beside | None = None
) -> StepTables:
    """The step time of a model on `model.tensor_parallel` GPUs.

    Raises:
        ProfileError: The model's sizes lie outside of the measured ones.
    """
    beside = beside or Beside()
    decode = _decode_s(kernels, model)
    outputs = kernels.gemm_curve(model.vocab_size // model.tensor_parallel, model.hidden_size)
    pairs, per_token_s = _prefill_s(kernels, model, float(decode[0, 0]))
    return StepTables(
        host_s=beside.host_s,
        attention_s=_digits(decode[0, 0]),
        tokens=_points(tokens_s(kernels, model, gpu, beside)),
        requests=_points(outputs, _MAX_OUTPUTS),
        pairs=_points(pairs),
        decode_requests=tuple(_DECODE_REQUESTS.tolist()),
        decode_context=tuple(_DECODE_CONTEXT.tolist()),
        decode_s=tuple(tuple(map(_digits, row)) for row in decode - decode[0, 0]),
        per_prompt_token_s=_digits(per_token_s),
        max_graph_tokens=beside.max_graph_tokens,
    )


def elementwise_s(model: Model, gpu: Gpu, beside: Beside, tokens: FloatArray) -> FloatArray:
    """Seconds of all layers' elementwise work over the tokens of a step."""
    per_token_s = model.elementwise_bytes / (gpu.hbm_bytes_per_s * beside.hbm_efficiency)
    return model.num_layers * (beside.launch_s_per_layer + per_token_s * tokens)


def tokens_s(
    kernels: KernelTables, model: Model, gpu: Gpu, beside: Beside, *, with_all_reduce: bool = True
) -> Curve:
    """Seconds of all layers without attention over the tokens of a step."""
    products = [kernels.gemm_curve(n, k) for n, k in model.layer_products]
    sizes = np.array(sorted(set.intersection(*(set(curve.sizes) for curve in products))))
    layer_s = sum(curve.at(sizes) for curve in products)
    if model.tensor_parallel > 1 and with_all_reduce:
        reduce = kernels.all_reduce_curve(model.tensor_parallel)
        layer_s = layer_s + 2.0 * reduce.at(sizes * model.hidden_size)
    seconds = model.num_layers * layer_s + elementwise_s(model, gpu, beside, sizes)
    return Curve(sizes, seconds)


def _decode_s(kernels: KernelTables, model: Model) -> FloatArray:
    """Seconds of all layers on the grid of requests and context.

    Few requests with much context each can take longer than many with as much in all, since fewer
    of the GPU's processors work on them. More requests must not take less: of such cells the least
    with as many or more requests counts, which is what a busy engine sees. With more context than
    was measured for so many requests, they take what fewer of them took.
    """
    curves = kernels.decode_curves(model.gpu_heads, model.gpu_kv_heads)
    batches = [batch for batch, _ in curves]
    columns: list[FloatArray] = []
    for context in _DECODE_CONTEXT:
        measured = np.array([curve.sizes[-1] >= context for _, curve in curves])
        if not measured.any():
            columns.append(columns[-1] * (context / _DECODE_CONTEXT[len(columns) - 1]))
            continue
        seconds = np.array([float(curve.at(context)) for _, curve in curves])
        last = int(np.flatnonzero(measured)[-1])
        seconds[:last][~measured[:last]] = np.inf
        ends = np.array([curve.seconds[-1] for _, curve in curves[last + 1 :]])
        seconds[last + 1 :] = np.maximum(ends, seconds[last])
        columns.append(np.minimum.accumulate(seconds[::-1])[::-1])
    grid = [np.interp(_DECODE_REQUESTS, batches, column) for column in columns]
    return model.num_layers * monotone(np.array(grid).T)


def _prefill_s(kernels: KernelTables, model: Model, least_s: float) -> tuple[Curve, float]:
    """Seconds of all layers over pairs, beyond the least, and per prompt token.

    Ramps between the knots and a price per token, none below zero, by least squares of the
    relative error over all measured batches of equal prompts.
    """
    rows = np.array(
        [
            (prompts * length, 0.5 * prompts * length**2, seconds)
            for prompts, length, seconds in kernels.prefill_rows(
                model.gpu_heads, model.gpu_kv_heads
            )
            if prompts * length <= _MAX_PROMPT_TOKENS
        ]
    )
    tokens, pairs, seconds = rows.T * [[1.0], [1.0], [model.num_layers]]
    starts = np.array([0.0, *_PAIR_KNOTS[:-1]])
    ends = np.array([*_PAIR_KNOTS[:-1], np.inf])
    ramps = np.clip(pairs[:, None], starts, ends) - starts
    table = np.column_stack([tokens, ramps])
    scale = table.max(axis=0)
    target = np.maximum(0.0, 1.0 - least_s / seconds)
    slopes = nnls(table / scale / seconds[:, None], target)[0] / scale
    heights = np.cumsum(slopes[1:] * np.diff([0.0, *_PAIR_KNOTS]))
    return Curve(np.array([0.0, *_PAIR_KNOTS]), np.array([0.0, *heights])), float(slopes[0])


def _points(curve: Curve, largest: float = np.inf) -> tuple[tuple[float, float], ...]:
    rising = monotone(curve.seconds)
    return tuple(
        (float(size), _digits(seconds))
        for size, seconds in zip(curve.sizes, rising, strict=True)
        if size <= largest
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def make_profile(kernels: KernelTables, model_key: str) -> dict[str, Any]:
    """The content of the file of a model on the GPU of the tables."""
    model, gpu, beside = MODELS[model_key], GPUS[kernels.gpu], Beside()
    document = roofline.describe(model_key, kernels.gpu)
    document["name"] = f"{document['name']}-{SUFFIX}"
    document["origin"] = (
        "kernel times measured by others, put together by "
        "python -m sola_sched.simulator.steps.measured"
    )
    document["sources"] = [_SOURCE]
    document["assumptions"] = {
        **{name: entry for name, entry in document["assumptions"].items() if name in _KEPT},
        **{name: {"value": getattr(beside, name), "from": why} for name, why in _WHY.items()},
    }
    document[SECTION] = build(kernels, model, gpu, beside).to_json()
    return document


# Assumptions of the KV memory, which are the roofline's.
_KEPT = ("memory_utilization", "reserved_bytes")


def make_profiles(data: Path) -> dict[str, str]:
    """The text of every measured profile by name."""
    texts = {}
    for gpu in MEASURED_GPUS:
        kernels = KernelTables.read(data, gpu)
        for model_key in MODELS:
            document = make_profile(kernels, model_key)
            texts[document["name"]] = _text(document)
    return texts


def _text(document: dict[str, Any]) -> str:
    """JSON with a row of numbers on one line."""
    spread = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), spread) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write all measured profiles; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sola_sched.simulator.steps.measured",
        description="Build the simulator's profiles from measured kernel times.",
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="kernel_*.csv.gz")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    texts = make_profiles(arguments.data)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"Wrote {len(texts)} profiles to {folder}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
