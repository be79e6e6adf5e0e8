"""Vendors' figures of GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Vendor's figures of one GPU.

    Attributes:
        flops: Dense tensor-core peak in 16 bit, FLOP/s.
        hbm_bytes_per_s: Memory bandwidth.
        link_bytes_per_s: NVLink or its like, one direction; PCIe where there is none.
        pcie_bytes_per_s: PCIe, one direction.
        memory_gib: Total memory as CUDA reports it.
    """

    name: str
    flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    memory_gib: float
    source: str


GPUS = {
    "a100": Gpu(
        "A100-SXM4-80GB", 312e12, 2.039e12, 300e9, 32e9, 79.25,
        "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM): 312 TFLOPS BF16 dense, 2,039 GB/s, "
        "NVLink 600 GB/s both directions, PCIe Gen4 64 GB/s both directions",
    ),
    "h100": Gpu(
        "H100-SXM5-80GB", 989.4e12, 3.35e12, 450e9, 64e9, 79.1,
        "NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper (SXM5): 989.4 TFLOPS "
        "BF16 dense, 3.35 TB/s, NVLink 900 GB/s both directions, PCIe Gen5 128 GB/s both "
        "directions",
    ),
    "v100": Gpu(
        "V100-SXM2-32GB", 125e12, 0.9e12, 150e9, 16e9, 31.74,
        "NVIDIA V100 Tensor Core GPU datasheet (SXM2): 125 TFLOPS FP16 tensor, 900 GB/s, "
        "NVLink 300 GB/s both directions, PCIe Gen3 32 GB/s both directions",
    ),
}  # fmt: skip
"""By the last part of a profile's name."""

MORE_GPUS = {
    "l40s": Gpu(
        "L40S", 362e12, 0.864e12, 32e9, 32e9, 44.4,
        "NVIDIA L40S datasheet: 362 TFLOPS BF16 dense, 864 GB/s, PCIe Gen4 64 GB/s both "
        "directions, no NVLink; resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    ),
    "l4": Gpu(
        "L4", 121e12, 0.3e12, 32e9, 32e9, 22.0,
        "NVIDIA L4 datasheet: 242 TFLOPS BF16 with sparsity, half of it dense, 300 GB/s, PCIe Gen4 "
        "64 GB/s both directions, no NVLink; nvidia.com/en-us/data-center/l4",
    ),
    "a10": Gpu(
        "A10", 125e12, 0.6e12, 32e9, 32e9, 22.0,
        "NVIDIA A10 datasheet: 125 TFLOPS BF16 dense, 600 GB/s, PCIe Gen4 64 GB/s both directions, "
        "no NVLink; nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
    ),
    "h200": Gpu(
        "H200-SXM-141GB", 989.4e12, 4.8e12, 450e9, 64e9, 139.8,
        "NVIDIA H200 datasheet (SXM): 1,979 TFLOPS BF16 with sparsity, half of it dense as on the "
        "H100, 4.8 TB/s, NVLink 900 GB/s both directions, PCIe Gen5 128 GB/s both directions; "
        "nvidia.com/en-us/data-center/h200",
    ),
    "b200": Gpu(
        "B200-SXM-180GB", 2250e12, 7.67e12, 900e9, 64e9, 178.3,
        "NVIDIA Blackwell datasheet (HGX): 2.25 PFLOPS BF16 dense, NVLink 1.8 TB/s both "
        "directions, PCIe Gen5 128 GB/s both directions. It has 8 TB/s; a bus of 7,680 bits at "
        "3,996 MHz, as the driver tells them, has 7.67 (github.com/pytorch/ao/pull/4002)",
    ),
    "mi300x": Gpu(
        "MI300X", 1307.4e12, 5.3e12, 448e9, 64e9, 191.7,
        "AMD Instinct MI300X datasheet: 1,307.4 TFLOPS BF16 dense, 5.3 TB/s, 7 Infinity Fabric "
        "links of 128 GB/s both directions, PCIe Gen5 128 GB/s both directions; amd.com/content/"
        "dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
    ),
}  # fmt: skip
"""Of which the package has no profiles and no measured kernels: all about them is computed.

Checked in November 2026 against pages that quote these sheets; memory against what PyTorch calls
the total capacity of such a GPU when it is full.
"""
ALL_GPUS = GPUS | MORE_GPUS
