"""Samples from public tables of measured times: the `gpu_steps` folder of the data sets.

- `derived_step_times.csv.gz`: whole steps put together from kernels that NVIDIA measured with vLLM
  on A100 and H100 (`ai-dynamo/aiconfigurator` 095f58a, Apache-2.0). Small elementwise kernels are
  computed, host time is missing.
- `engine_splitwise_2023.csv.gz`: prefills and mean decode steps of vLLM of October 2023, without
  CUDA graphs (`Mutinifni/splitwise-sim` 8f99e7d, MIT).
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sola_sched.cluster.performance.samples import DecodeSamples, PrefillSamples
from sola_sched.errors import DatasetError

KERNELS = "kernel times of ai-dynamo/aiconfigurator 095f58a (NVIDIA, Apache-2.0)"
SPLITWISE = "engine times of Mutinifni/splitwise-sim 8f99e7d (MIT), vLLM of October 2023"


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one model on one kind of GPU.

    Attributes:
        model, gpu: As the table names them.
        num_gpus: Tensor parallel degree.
        origin: Source and licence.
    """

    model: str
    gpu: str
    num_gpus: int
    prefill: PrefillSamples
    decode: DecodeSamples
    origin: str

    @property
    def name(self) -> str:
        """Name of the file of the fitted model."""
        return f"{self.model}-{self.gpu}-tp{self.num_gpus}"


def kernel_steps(folder: Path) -> Iterator[MeasuredSteps]:
    """The steps of `derived_step_times`, by model and GPU.

    Raises:
        DatasetError: The table is missing.
    """
    for (model, gpu, num_gpus), rows in _groups(
        folder / "derived_step_times.csv.gz", ("model", "gpu", "tp")
    ):
        prefill = [
            (1, row["prefill"], row["prefill"], _seconds(row, "measured_ms"))
            for row in rows
            if row["kind"] == "prefill"
        ]
        decode = [
            (row["batch"], row["ctx"], float(row["batch"]) * float(row["ctx"]),
             _seconds(row, "measured_ms"))
            for row in rows
            if row["kind"] == "decode"
        ]  # fmt: skip
        yield MeasuredSteps(
            model, gpu, int(num_gpus),
            PrefillSamples.of_rows(prefill), DecodeSamples.of_rows(decode), KERNELS,
        )  # fmt: skip


def splitwise_steps(folder: Path) -> Iterator[MeasuredSteps]:
    """The steps of `engine_splitwise_2023`, by model, GPU and tensor parallel degree.

    A decode step counts with the mean context of the decode that was timed.

    Raises:
        DatasetError: The table is missing.
    """
    keys = ("model", "gpu", "tensor_parallel")
    for (model, gpu, num_gpus), rows in _groups(folder / "engine_splitwise_2023.csv.gz", keys):
        prefill, decode = [], []
        for row in rows:
            b, n, out = (float(row[k]) for k in ("batch_size", "prompt_tokens", "output_tokens"))
            prefill.append((b, n, b * n, _seconds(row, "prompt_ms")))
            ctx = n + out / 2.0
            decode.append((b, ctx, b * ctx, _seconds(row, "token_ms")))
        yield MeasuredSteps(
            model, f"{gpu}-2023", int(num_gpus),
            PrefillSamples.of_rows(prefill), DecodeSamples.of_rows(decode), SPLITWISE,
        )  # fmt: skip


def _groups(
    path: Path, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[Mapping[str, str]]]]:
    if not path.is_file():
        raise DatasetError(f"Table {str(path)!r} must exist; name the folder `gpu_steps`.")
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups[tuple(row[key] for key in keys)].append(row)
    yield from sorted(groups.items())


def _seconds(row: Mapping[str, str], column: str) -> float:
    return float(row[column]) / 1e3
