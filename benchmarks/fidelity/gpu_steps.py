"""Single steps put together from measured kernels, against the profiles that predict them.

`python benchmarks/run.py fidelity-gpu-steps` prints the errors of the measured profiles, built from
all rows and without those of the very steps, and of the roofline, as shipped and corrected; and
what layers take in the tables of a second source.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fidelity.gpu_engines import data_folder
from harness.setup import Outcome, Setup
from sola_sched.simulator.steps.gpus import GPUS, Gpu
from sola_sched.simulator.steps.kernels import KernelTables
from sola_sched.simulator.steps.measured import (
    MEASURED_GPUS,
    Beside,
    build,
    elementwise_s,
    tokens_s,
)
from sola_sched.simulator.steps.roofline import (
    MODELS,
    Assumptions,
    Model,
    corrected,
    step_time,
)
from sola_sched.simulator.steps.time import StepCounts, StepTimeModel

#: Sizes of which `KernelTables.thinned` keeps neither the token counts nor the attention.
PROMPTS = (256, 1024, 4096)
REQUESTS = (2, 8, 32, 128)
CONTEXTS = (256, 1024, 4096)
_MIXED_CONTEXT = 1024
#: Of KV, what the largest measured batch of attention holds on an engine.
_MAX_CONTEXT = 400_000

StepSeconds = Callable[[StepCounts], float]


@dataclass(frozen=True)
class Step:
    """A step of equal decodes and at most one whole prompt."""

    kind: str
    num_decodes: int
    context: int
    prompt: int

    @property
    def size(self) -> str:
        """What the table calls it."""
        parts = [f"prompt {self.prompt}"] if self.prompt else []
        return " + ".join(parts + ([f"{self.num_decodes} decodes"] if self.num_decodes else []))

    @property
    def counts(self) -> StepCounts:
        """What it computes."""
        return StepCounts(
            self.num_decodes, self.num_decodes * self.context, int(self.prompt > 0), self.prompt,
            0.5 * self.prompt**2,
        )  # fmt: skip


@dataclass(frozen=True)
class Error:
    """A step, what it takes by the measured rows, and each prediction over that less one."""

    model: str
    gpu: str
    step: Step
    measured_s: float
    off: dict[str, float]


def steps(max_model_len: int) -> Iterator[Step]:
    """The steps compared, those that a model of this context has."""
    for prompt in PROMPTS:
        if prompt <= max_model_len:
            yield Step("prefill", 0, 0, prompt)
    for requests in REQUESTS:
        for context in CONTEXTS:
            if context < max_model_len and requests * context <= _MAX_CONTEXT:
                yield Step("decode", requests, context, 0)
    for prompt in PROMPTS:
        for requests in REQUESTS:
            if prompt <= max_model_len:
                yield Step("mixed", requests, _MIXED_CONTEXT, prompt)


def measured_s(kernels: KernelTables, model: Model, gpu: Gpu, step: Step) -> float:
    """The step from the rows themselves, neither fitted nor made monotone.

    As in the profiles elementwise work and the host's part are computed, and attention of decodes
    and of a prompt in one step is the sum of both without a second launch.
    """
    counts = step.counts
    tokens = float(counts.num_decodes + counts.prefill_tokens)
    layer_s = sum(float(kernels.gemm_curve(n, k).at(tokens)) for n, k in model.layer_products)
    if model.tensor_parallel > 1:
        reduce = kernels.all_reduce_curve(model.tensor_parallel)
        layer_s += 2.0 * float(reduce.at(tokens * model.hidden_size))
    curves = kernels.decode_curves(model.gpu_heads, model.gpu_kv_heads)
    launch_s = min(float(curve.seconds.min()) for _, curve in curves)
    attention = [launch_s]
    if step.prompt:
        rows = kernels.prefill_rows(model.gpu_heads, model.gpu_kv_heads)
        attention += [s for prompts, n, s in rows if (prompts, n) == (1, step.prompt)]
    if step.num_decodes:
        seconds = [float(curve.at(counts.decode_ctx)) for _, curve in curves]
        batches = [batch for batch, _ in curves]
        attention.append(float(np.interp(step.num_decodes, batches, seconds)))
    layer_s += sum(attention) - (len(attention) - 1) * launch_s
    output = kernels.gemm_curve(model.vocab_size // model.tensor_parallel, model.hidden_size)
    beside = Beside()
    return (
        beside.host_s
        + model.num_layers * layer_s
        + float(elementwise_s(model, gpu, beside, np.array(tokens)))
        + float(output.at(float(counts.num_decodes + counts.num_prefills)))
    )


def errors(folder: Path, models: Sequence[str] = tuple(MODELS)) -> list[Error]:
    """Every step of the models, on every measured GPU."""
    found = []
    for gpu_key in MEASURED_GPUS:
        kernels, gpu = KernelTables.read(folder, gpu_key), GPUS[gpu_key]
        thin = kernels.thinned()
        # The rows that steps are put together from are not padded.
        beside = Beside(max_graph_tokens=0)
        for name in models:
            model = MODELS[name]
            predictions: dict[str, StepSeconds] = {
                "held out": build(thin, model, gpu, beside).seconds,
                "all rows": build(kernels, model, gpu, beside).seconds,
                "roofline": roofline_of(model, gpu, Assumptions()).seconds,
                "corrected": roofline_of(model, gpu, corrected(gpu_key)).seconds,
            }
            for step in steps(model.max_model_len):
                seconds = measured_s(kernels, model, gpu, step)
                off = {key: of(step.counts) / seconds - 1 for key, of in predictions.items()}
                found.append(Error(name, gpu_key, step, seconds, off))
    return found


def table(of_errors: Iterable[Error], group_of: Callable[[Error], tuple[str, ...]]) -> str:
    """Mean and largest absolute error, and mean error, of each prediction by group."""
    groups: dict[tuple[str, ...], list[Error]] = {}
    for error in of_errors:
        groups.setdefault(group_of(error), []).append(error)
    keys = list(next(iter(groups.values()))[0].off)
    width = len(next(iter(groups)))
    heads = [""] * width + ["steps"] + [f"{key} {of}" for key in keys for of in _COLUMNS]
    lines = [heads, ["---"] * width + ["---:"] * (1 + len(_COLUMNS) * len(keys))]
    for group, members in groups.items():
        cells = [*group, str(len(members))]
        for key in keys:
            off = np.array([member.off[key] for member in members])
            cells += [f"{np.abs(off).mean():.1%}", f"{np.abs(off).max():.0%}", f"{off.mean():+.1%}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_COLUMNS = ("error", "worst", "off")


def second_source(folder: Path) -> str:
    """Layers without attention as Vidur measured them, over the tokens of the profiles' curve."""
    path = folder / "vidur_layer_operators.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    lines = [["model", "GPU", *(f"{size} tokens" for size in _VIDUR_TOKENS)]]
    lines.append(["---", "---", *["---:"] * len(_VIDUR_TOKENS)])
    for gpu_key in MEASURED_GPUS:
        kernels = KernelTables.read(folder, gpu_key)
        for vidur, name in _VIDUR_MODELS.items():
            model = MODELS[name]
            by_size = {
                int(entry["num_tokens"]): _layer_s(entry)
                for entry in entries
                if (entry["gpu"], entry["model"]) == (gpu_key, vidur)
                and int(entry["tensor_parallel"]) == model.tensor_parallel
            }
            if not by_size:
                continue
            sizes = np.array(sorted(by_size), float)
            seconds = np.array([by_size[int(size)] for size in sizes])
            ours = tokens_s(kernels, model, GPUS[gpu_key], Beside(), with_all_reduce=False)
            cells = []
            for size in _VIDUR_TOKENS:
                theirs = model.num_layers * float(np.interp(size, sizes, seconds))
                known = size <= sizes[-1]
                cells.append(f"{theirs / float(ours.at(float(size))):.2f}" if known else "")
            lines.append([name, gpu_key, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_VIDUR_TOKENS = (1, 64, 256, 1024, 2048, 4096)
_VIDUR_MODELS = {
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Llama-2-7b-hf": "vicuna-7b-16k",
}
_NOT_OF_A_LAYER = ("emb_ms",)


def _layer_s(entry: dict[str, str]) -> float:
    of_layer = [name for name in entry if name.endswith("_ms") and name not in _NOT_OF_A_LAYER]
    return 1e-3 * sum(float(entry[name] or 0.0) for name in of_layer)


def roofline_of(model: Model, gpu: Gpu, assumed: Assumptions) -> StepTimeModel:
    """Step times from the vendor's figures alone."""
    values = step_time(model, gpu, assumed)
    return StepTimeModel(**{name: value for name, (value, _) in values.items()})


def gpu_steps(setup: Setup) -> Outcome:
    """Errors by size and by model, and layers of a second source."""
    folder = data_folder(setup.data)
    found = errors(folder)
    by_size = table(found, lambda error: (error.gpu, error.step.kind, error.step.size))
    by_model = table(found, lambda error: (error.gpu, error.model, error.step.kind))
    title = "A layer without attention in Vidur's tables, over that of the profiles:"
    return Outcome([], "\n\n".join([by_size, by_model, title, second_source(folder)]))
