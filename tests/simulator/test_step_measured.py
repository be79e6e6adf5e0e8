"""Profiles from measured kernels: by hand on small tables, and those of the package."""

from __future__ import annotations

import csv
import gzip
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sola_sched.errors import ProfileError
from sola_sched.simulator.steps.gpus import GPUS
from sola_sched.simulator.steps.kernels import KernelTables, monotone
from sola_sched.simulator.steps.measured import (
    MEASURED_GPUS,
    SUFFIX,
    Beside,
    build,
    elementwise_s,
    main,
)
from sola_sched.simulator.steps.profile import FOLDER, load_step_profile, profile_names
from sola_sched.simulator.steps.roofline import MODELS, Model
from sola_sched.simulator.steps.tables import StepTables
from sola_sched.simulator.steps.time import StepCounts

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("SOLA_SCHED_DATA", ROOT.parent / "shared" / "data")) / "gpu_steps"
needs_data = pytest.mark.skipif(
    not (DATA / "kernel_gemm.csv.gz").is_file(), reason="needs the measured kernel times"
)
#: Two layers of 8 query and 2 KV heads of 128.
SMALL = Model("small", 1024, 2048, 2, 8, 2, 4096, 4096, tensor_parallel=2)
MS = 1e-3


def write(
    folder: Path, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables in which every time is a formula of the sizes."""
    widths = (512, 1024, 2048, 4096)
    write(
        tmp_path, "kernel_gemm", ("gpu", "m", "n", "k", "latency_ms"),
        [
            ("a100", m, n, k, gemm_ms(m, n, k))
            for m in (1, 64, 128, 256, 1024) for n in widths for k in widths
        ],
    )  # fmt: skip
    write(
        tmp_path, "kernel_attention",
        ("gpu", "op", "batch_size", "context", "num_heads", "num_key_value_heads", "latency_ms"),
        [
            ("a100", op, b, c, 4, 1, f(b, c))
            for op, f in (("prefill", prefill_ms), ("decode", decode_ms))
            for b in (1, 2, 4, 8, 16, 32)
            for c in (256, 512, 1024, 2048, 4096)
        ],
    )  # fmt: skip
    write(
        tmp_path, "kernel_all_reduce",
        ("gpu", "kind", "num_gpus", "message_elements", "latency_ms"),
        [("a100", "NCCL", 2, e, 0.02 + 1e-6 * e) for e in (1024, 1 << 20)]
        + [("a100", "vLLM_custom_graph", 2, e, 0.01 + 1e-6 * e) for e in (1024, 1 << 20)]
        + [("a100", "vLLM_custom_eager", 2, 1024, 1e-9)],
    )  # fmt: skip
    return tmp_path


def gemm_ms(m: int, n: int, k: int) -> float:
    return 1e-8 * n * k * (100 + m)


def prefill_ms(batch: int, context: int) -> float:
    return 0.01 + 1e-5 * batch * context + 1e-7 * batch * context**2


def decode_ms(batch: int, context: int) -> float:
    return 0.01 + 1e-5 * batch * context


def test_a_step_is_the_sum_of_its_measured_operators(folder: Path) -> None:
    kernels, beside = KernelTables.read(folder, "a100"), Beside(max_graph_tokens=0)
    tables = build(kernels, SMALL, GPUS["a100"], beside)

    seconds = tables.seconds(StepCounts(4, 4 * 1024, 1, 252, 0.5 * 252**2))

    tokens = 256
    layer_ms = sum(gemm_ms(tokens, n, k) for n, k in SMALL.layer_products)
    layer_ms += 2 * (0.01 + 1e-6 * tokens * 1024)
    # The shortest attention kernel reads 256 tokens; beyond it decodes and prompt add up.
    layer_ms += decode_ms(4, 1024) + 1e-5 * 252 + 1e-7 * 252**2
    elementwise = float(elementwise_s(SMALL, GPUS["a100"], beside, np.array(float(tokens))))
    output_ms = gemm_ms(5, 2048, 1024)
    expected = 0.5 * MS + 2 * layer_ms * MS + elementwise + output_ms * MS
    assert seconds == pytest.approx(expected, rel=0.02)
    assert SMALL.layer_products == [(768, 1024), (1024, 512), (2048, 1024), (1024, 1024)]


def test_elementwise_work_is_the_bytes_that_a_token_moves() -> None:
    # Per token, layer and GPU: 8 hidden vectors for two norms; 4 + 1 heads turned and 2 written,
    # read and written; gate, up and product of half the MLP.
    elements = 8 * 1024 + 2 * 5 * 128 + 2 * 2 * 128 + 3 * 1024
    bandwidth = 0.8 * GPUS["a100"].hbm_bytes_per_s

    seconds = elementwise_s(SMALL, GPUS["a100"], Beside(), np.array([0.0, 1000.0]))

    assert seconds[0] == pytest.approx(2 * 10e-6)
    assert seconds[1] - seconds[0] == pytest.approx(2 * 1000 * 2 * elements / bandwidth)


def test_more_kv_heads_than_measured_are_more_requests(folder: Path) -> None:
    write(
        folder, "kernel_attention",
        ("gpu", "op", "batch_size", "context", "num_heads", "num_key_value_heads", "latency_ms"),
        [("a100", "decode", b, c, 8, 8, decode_ms(b, c)) for b in (1, 2, 4) for c in (64, 128)],
    )  # fmt: skip
    kernels = KernelTables.read(folder, "a100")

    curves = kernels.decode_curves(16, 16)

    assert [batch for batch, _ in curves] == [0.5, 1.0, 2.0]
    assert curves[2][1].at(128.0) == pytest.approx(decode_ms(4, 64) * MS)


def test_widths_between_measured_ones_are_interpolated_and_beyond_them_scaled(
    folder: Path,
) -> None:
    kernels = KernelTables.read(folder, "a100")

    assert kernels.gemm_curve(1536, 768).at(64.0) == pytest.approx(gemm_ms(64, 1536, 768) * MS)
    assert kernels.gemm_curve(8192, 512).at(64.0) == pytest.approx(gemm_ms(64, 8192, 512) * MS)
    with pytest.raises(ProfileError, match="on both sides of 8192"):
        kernels.gemm_curve(512, 8192)


def test_thinned_tables_lack_every_second_size_and_keep_the_ends(folder: Path) -> None:
    kernels = KernelTables.read(folder, "a100")

    thin = kernels.thinned()

    assert sorted(thin.gemm[512, 512]) == [1, 128, 1024]
    assert {c for _, c in thin.prefill[4, 1]} == {256, 1024, 4096}
    assert {b for b, _ in thin.decode[4, 1]} == {1, 4, 16, 32}
    assert sorted(kernels.gemm[512, 512]) == [1, 64, 128, 256, 1024]


def test_the_monotone_row_is_as_near_as_one_can_be() -> None:
    assert monotone(np.array([1.0, 5.0, 3.0, 6.0])).tolist() == [1.0, 4.0, 4.0, 6.0]


def test_a_folder_without_the_tables_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ProfileError, match=r"must hold kernel_gemm\.csv\.gz"):
        KernelTables.read(tmp_path / "none", "a100")
    with pytest.raises(ProfileError, match="must hold rows of 'h100'"):
        KernelTables.read(folder, "h100")


def test_every_model_has_a_profile_on_every_measured_gpu() -> None:
    expected = {f"{model}-{gpu}-{SUFFIX}" for model in MODELS for gpu in MEASURED_GPUS}

    assert expected == {name for name in profile_names() if name.endswith(SUFFIX)}
    for name in expected:
        step_time = load_step_profile(name).step_time
        assert isinstance(step_time, StepTables)
        assert step_time.max_graph_tokens == 512


@needs_data
def test_files_of_the_package_are_what_the_tables_give(tmp_path: Path) -> None:
    assert main(["--data", str(DATA), "--output", str(tmp_path)]) == 0

    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in FOLDER.glob(f"*-{SUFFIX}.json")}


#: Over single steps of one model: mean absolute error, the largest. Found: 0.4 to 1.5 and 10 % with
#: all rows, 0.7 to 5.2 and 9 % where every second size was left out.
LIMITS = {"all rows": (0.02, 0.12), "held out": (0.06, 0.12)}


@needs_data
def test_steps_are_predicted_within_the_stated_errors() -> None:
    errors = importlib.import_module("fidelity.gpu_steps").errors(DATA, ["llama-3-8b"])

    for gpu in MEASURED_GPUS:
        for kind in ("prefill", "decode", "mixed"):
            of_kind = [e for e in errors if (e.gpu, e.step.kind) == (gpu, kind)]
            for name, (mean, largest) in LIMITS.items():
                off = np.abs([e.off[name] for e in of_kind])
                assert off.mean() <= mean, (gpu, kind, name)
                assert off.max() <= largest, (gpu, kind, name)


#: Mean over all steps of the corrected roofline.
ROOFLINE_LIMIT = 0.09


@needs_data
def test_the_corrected_roofline_is_nearer_to_kernels_than_the_shipped_one() -> None:
    errors = importlib.import_module("fidelity.gpu_steps").errors(DATA, ["llama-3-8b"])

    for gpu in MEASURED_GPUS:
        of_gpu = [e for e in errors if e.gpu == gpu]
        shipped, fitted = (
            np.abs([e.off[name] for e in of_gpu]).mean() for name in ("roofline", "corrected")
        )
        assert fitted < min(ROOFLINE_LIMIT, shipped), gpu


#: Found: 6 % too little for the prompts, 11 % for prompts and outputs; the engine was one of 2024.
ENGINE_LIMIT = 0.15


@needs_data
@pytest.mark.vllm
def test_an_engine_on_one_a100_is_predicted_within_the_stated_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = importlib.import_module("fidelity.gpu_engines")
    entries = [
        entry
        for entry in engines._read(DATA / "engine_static_batches.csv.gz")
        if (entry["gpu"], entry["num_gpus"]) == ("a100-40gb", "1")
        and entry["model"] == "meta-llama/Meta-Llama-3-8B"
        and (entry["output_tokens"], entry["batch_size"]) in (("1", "16"), ("128", "16"))
    ]
    monkeypatch.setattr(engines, "_read", lambda path: entries)

    rows = list(engines._static_batches(DATA))

    assert {row.kind for row in rows} == {"batch", "prefill"}
    off = [row.predicted_s["measured"] / row.measured_s - 1 for row in rows if row.fits]
    assert np.abs(off).mean() < ENGINE_LIMIT
    assert "| batch | Meta-Llama-3-8B | 1 x a100-40gb |" in engines.table(rows)
