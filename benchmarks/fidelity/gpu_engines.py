"""Whole engines on A100 and H100, measured by others, against the simulator.

`python benchmarks/run.py fidelity-gpu-engines`: static batches are scheduled by vLLM's own
scheduler in the virtual engine, and each of their steps takes what the measured kernels of the GPU
and the roofline say.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from harness.setup import Outcome, Setup
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.gpus import GPUS, Gpu
from sola_sched.simulator.steps.kernels import KernelTables
from sola_sched.simulator.steps.measured import build
from sola_sched.simulator.steps.roofline import (
    MODELS,
    Assumptions,
    Model,
    corrected,
    num_blocks,
    step_time,
)
from sola_sched.simulator.steps.tables import Points, StepTables
from sola_sched.simulator.steps.time import StepCounts, StepTimeModel

_ROOT = Path(__file__).resolve().parents[2]
_LLAMA_2_70B = Model("Llama-2-70b", 8192, 28672, 80, 64, 8, 32000, 4096)
_MODELS = {
    "meta-llama/Meta-Llama-3-8B": MODELS["llama-3-8b"],
    "meta-llama/Meta-Llama-3-70B": MODELS["llama-3-70b"],
    "meta-llama/Llama-2-7b-hf": replace(MODELS["vicuna-7b-16k"], max_model_len=4096),
    "meta-llama/Llama-2-70b-hf": _LLAMA_2_70B,
    "llama2-70b": _LLAMA_2_70B,
    "mistralai/Mistral-7B-v0.1": Model("Mistral-7B", 4096, 14336, 32, 32, 8, 32000, 8192),
    "Qwen/Qwen2-72B": Model("Qwen2-72B", 8192, 29568, 80, 64, 8, 152064, 8192),
}
_A100_40GB = replace(
    GPUS["a100"], name="A100-SXM4-40GB", hbm_bytes_per_s=1.555e12, memory_gib=39.39,
    source="NVIDIA A100 Tensor Core GPU datasheet (40GB SXM): 1,555 GB/s",
)  # fmt: skip
#: GPU of the rows: our figures of it, and whose kernels were measured.
_GPUS = {
    "h100": (GPUS["h100"], "h100"),
    "h100-80gb": (GPUS["h100"], "h100"),
    "a100-80gb": (GPUS["a100"], "a100"),
    "a100-40gb": (_A100_40GB, "a100"),
}
#: Of the engines of 2023 only these runs were ended by their length.
_SPLITWISE_OUTPUT = 128

StepSeconds = Callable[[StepCounts], float]


@dataclass(frozen=True)
class Row:
    """One measured batch of equal requests, and what the simulator makes of it.

    Attributes:
        source: Where it was measured.
        kind: `batch` (from start to the last token), `prefill` (to the first token), `decode`
            (mean step after it).
        num_steps: Of the measured span.
        fits: The KV of all requests fits into memory at once.
        predicted_s: Seconds by step-time model.
    """

    source: str
    gpu: str
    num_gpus: int
    model: str
    kind: str
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    measured_s: float
    num_steps: int
    fits: bool
    predicted_s: dict[str, float]


def rows(folder: Path) -> list[Row]:
    """Every measured batch of the folder's tables, predicted.

    Raises:
        ProfileError: Kernel tables are missing.
    """
    return [*_static_batches(folder), *_splitwise(folder)]


def _static_batches(folder: Path) -> Iterator[Row]:
    """`engine_static_batches`: LLM-Inference-Bench, vLLM of 2024."""
    measured: dict[tuple[str, ...], float] = {}
    for entry in _read(folder / "engine_static_batches.csv.gz"):
        key = tuple(entry[name] for name in list(entry)[:-1])
        measured[key] = min(float(entry["latency_s"]), measured.get(key, np.inf))
    for (gpu, num_gpus, model, prompt, output, batch), seconds in measured.items():
        case = _Case(gpu, int(num_gpus), model, int(prompt), int(output), int(batch))
        kind = "prefill" if case.output == 1 else "batch"
        yield case.row(folder, "LLM-Inference-Bench, vLLM 2024", kind, seconds)


def _splitwise(folder: Path) -> Iterator[Row]:
    """`engine_splitwise_2023`: vLLM of October 2023 without CUDA graphs.

    Prompts of one request only: those of several took two to four times what their tokens do.
    """
    prefill: dict[_Case, list[float]] = {}
    decode: dict[_Case, list[float]] = {}
    for entry in _read(folder / "engine_splitwise_2023.csv.gz"):
        case = _Case(
            entry["gpu"], int(entry["tensor_parallel"]), entry["model"],
            int(entry["prompt_tokens"]), int(entry["output_tokens"]), int(entry["batch_size"]),
        )  # fmt: skip
        if case.gpu in _GPUS and case.model in _MODELS and case.output == _SPLITWISE_OUTPUT:
            if case.batch == 1:
                prefill.setdefault(case, []).append(float(entry["prompt_ms"]))
            decode.setdefault(case, []).append(float(entry["token_ms"]))
    for kind, cases in (("prefill", prefill), ("decode", decode)):
        for case, times_ms in cases.items():
            seconds = 1e-3 * float(np.median(times_ms))
            yield case.row(folder, "Splitwise, vLLM 2023", kind, seconds)


@dataclass(frozen=True)
class _Case:
    gpu: str
    num_gpus: int
    model: str
    prompt: int
    output: int
    batch: int

    def row(self, folder: Path, source: str, kind: str, measured_s: float) -> Row:
        model = replace(_MODELS[self.model], tensor_parallel=self.num_gpus)
        blocks = num_blocks(model, _GPUS[self.gpu][0], Assumptions())
        needed = self.batch * -(-(self.prompt + self.output) // 16)
        fits = needed < blocks
        length = max(model.max_model_len, self.prompt + self.output)
        steps = _steps(self.prompt, self.output, self.batch, length, 0 if fits else blocks)
        chosen = {
            "batch": steps,
            "prefill": [step for step in steps if step.num_prefills],
            "decode": [step for step in steps if not step.num_prefills],
        }[kind]
        share = 1.0 / len(chosen) if kind == "decode" else 1.0
        models = step_models(folder, model, self.gpu)
        predicted = {name: share * sum(map(seconds, chosen)) for name, seconds in models.items()}
        return Row(
            source, self.gpu, self.num_gpus, self.model.split("/")[-1], kind, self.prompt,
            self.output, self.batch, measured_s, 1 if kind == "decode" else len(chosen), fits,
            predicted,
        )  # fmt: skip


@lru_cache(maxsize=64)
def step_models(folder: Path, model: Model, gpu: str) -> dict[str, StepSeconds]:
    """Step times of a model on a GPU of the tables, by how they were made."""
    figures, kernels_of = _GPUS[gpu]
    tables = build(_kernels(folder, kernels_of), model, figures)
    if figures.hbm_bytes_per_s < GPUS[kernels_of].hbm_bytes_per_s:
        tables = with_slower_memory(tables, GPUS[kernels_of], figures)
    rooflines = {
        name: StepTimeModel(**{key: value for key, (value, _) in of_model.items()}).seconds
        for name, of_model in (
            ("roofline", step_time(model, figures, Assumptions())),
            ("corrected", step_time(model, figures, corrected(kernels_of))),
        )
    }
    return {"measured": tables.seconds, **rooflines}


def with_slower_memory(tables: StepTables, measured: Gpu, other: Gpu) -> StepTables:
    """The tables of a GPU that differs from the measured one in its memory bandwidth alone.

    What one token takes is reading the weights, and attention of decodes is reading KV: both go
    with the bandwidth. More tokens take no less than that.
    """
    factor = measured.hbm_bytes_per_s / other.hbm_bytes_per_s

    def at_least(points: Points) -> Points:
        least = factor * points[0][1]
        return tuple((size, max(seconds, least)) for size, seconds in points)

    return replace(
        tables,
        tokens=at_least(tables.tokens),
        requests=at_least(tables.requests),
        decode_s=tuple(tuple(factor * s for s in row) for row in tables.decode_s),
    )


@lru_cache(maxsize=4)
def _kernels(folder: Path, gpu: str) -> KernelTables:
    return KernelTables.read(folder, gpu)


@lru_cache(maxsize=256)
def _steps(
    prompt: int, output: int, batch: int, max_model_len: int, blocks: int
) -> list[StepCounts]:
    """The steps of a batch under vLLM's scheduler; `blocks` 0 for more than enough.

    Whole prompts, as vLLM scheduled them until 2024. The schedule of a batch that is there from the
    start does not depend on what steps take.
    """
    from sola_sched.simulator.engine import VirtualEngine
    from sola_sched.simulator.host import stock_scheduler_cls
    from sola_sched.simulator.request import VirtualRequest

    taken: list[StepCounts] = []

    def take(scheduled: object, requests: object) -> float:
        taken.append(StepCounts.of(scheduled, requests))  # type: ignore[arg-type]
        return 1.0

    engine = VirtualEngine(
        stock_scheduler_cls(async_scheduling=False),
        num_blocks=blocks or 2 + batch * (1 + max_model_len // 16),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        enable_chunked_prefill=False,
        step_time=take,
    )
    engine.run([VirtualRequest(f"r{i}", 0.0, output, prompt) for i in range(batch)])
    return [step for step in taken if step.num_decodes or step.num_prefills]


def _read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(of_rows: Iterable[Row]) -> str:
    """Errors by source, kind, model and GPUs; batches that do not fit stand apart.

    `off` is the mean of predicted / measured - 1, `error` the mean of its absolute value. `host ms`
    is the median of what a measured step takes longer than the predicted one, and `error + host`
    the error of a row when each of its steps gets that of the other rows of its group.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in of_rows:
        kind = row.kind if row.fits else f"{row.kind}, in waves"
        gpus = f"{row.num_gpus} x {row.gpu}"
        groups.setdefault((row.source, kind, row.model, gpus), []).append(row)
    names = list(next(iter(groups.values()))[0].predicted_s)
    heads = ["source", "kind", "model", "GPUs", "rows"]
    heads += [f"{name} {column}" for name in names for column in ("off", "error")]
    heads += ["host ms", "error + host"]
    lines = [heads, ["---"] * 4 + ["---:"] * (len(heads) - 4)]
    for group, members in sorted(groups.items()):
        cells = [*group, str(len(members))]
        for name in names:
            off = np.array([row.predicted_s[name] / row.measured_s - 1 for row in members])
            cells += [f"{off.mean():+.1%}", f"{np.abs(off).mean():.1%}"]
        lines.append([*cells, *_host_cells(members, names[0])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _host_cells(rows: Sequence[Row], name: str) -> list[str]:
    gaps = np.array([(row.measured_s - row.predicted_s[name]) / row.num_steps for row in rows])
    host = f"{1e3 * float(np.median(gaps)):.2f}"
    if len(rows) < 2:
        return [host, ""]
    off = [
        (row.predicted_s[name] + row.num_steps * np.median(np.delete(gaps, index)))
        / row.measured_s - 1
        for index, row in enumerate(rows)
    ]  # fmt: skip
    return [host, f"{np.abs(off).mean():.1%}"]


def data_folder(data: Path | None) -> Path:
    """The folder of the measured tables.

    Raises:
        ConfigError: It is not among the data sets.
    """
    folder = None if data is None else data / "gpu_steps"
    if folder is None or not (folder / "kernel_gemm.csv.gz").is_file():
        raise ConfigError("'--data' must hold gpu_steps/kernel_gemm.csv.gz (got no such file).")
    return folder


def gpu_engines(setup: Setup) -> Outcome:
    """Errors by source, kind, model and GPUs."""
    return Outcome([], table(rows(data_folder(setup.data))))
