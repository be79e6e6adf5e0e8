"""The wheel with which a release of vLLM without a CPU build is tried; no vLLM is needed here."""

from __future__ import annotations

import zipfile
from pathlib import Path

from vllm_bare import write_bare

METADATA = """Metadata-Version: 2.4
Name: vllm
Version: 0.33.0
Requires-Dist: torch==2.14.0
Requires-Dist: Huggingface_Hub>=1.31.0
Requires-Dist: orjson>=3.11.6
Requires-Dist: flashinfer-python==0.7.2
Requires-Dist: tilelang==0.1.12; platform_system == "Linux"

Version: of the text below, which stays.
"""
CPU_REQUIREMENTS = ["torch==2.13.0+cpu", "huggingface-hub>=1.27", "intel-openmp==2024.2.1"]


def test_it_is_named_for_the_cpu_and_has_neither_cuda_nor_what_was_compiled(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "x = 1")
        archive.writestr("vllm/_C.abi3.so", b"compiled")
        archive.writestr("vllm/vllm-rs", b"compiled")
        archive.writestr("vllm-0.33.0.dist-info/METADATA", METADATA)
        archive.writestr("vllm-0.33.0.dist-info/WHEEL", "Tag: cp38-abi3-manylinux_2_28_x86_64")
        archive.writestr("vllm-0.33.0.dist-info/RECORD", "vllm/_C.abi3.so,sha256=x,8")
        archive.writestr("vllm-0.33.0.dist-info/entry_points.txt", "[console_scripts]")
    folder = tmp_path / "bare"
    folder.mkdir()

    bare = write_bare(wheel, folder, CPU_REQUIREMENTS)

    info = "vllm-0.33.0+cpu.dist-info"
    assert bare == folder / "vllm-0.33.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(bare) as archive:
        names = archive.namelist()
        assert sorted(names) == sorted(
            [
                "vllm/__init__.py",
                *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
            ]
        )
        metadata = archive.read(f"{info}/METADATA").decode()
        assert metadata.splitlines()[:5] == [
            "Metadata-Version: 2.4",
            "Name: vllm",
            "Version: 0.33.0+cpu",
            "Requires-Dist: Huggingface_Hub>=1.31.0",
            "Requires-Dist: orjson>=3.11.6",
        ]
        assert metadata.endswith("\n\nVersion: of the text below, which stays.\n")
        record = archive.read(f"{info}/RECORD").decode()
        assert [line.split(",")[0] for line in record.splitlines()] == names
        assert "py3-none-any" in archive.read(f"{info}/WHEEL").decode()
