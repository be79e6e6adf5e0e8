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
        "directions, no NVLink",
    ),
    "l4": Gpu(
        "L4", 121e12, 0.3e12, 32e9, 32e9, 22.0,
        "NVIDIA L4 datasheet: 242 TFLOPS BF16 with sparsity, half of it dense, 300 GB/s, PCIe Gen4 "
        "64 GB/s both directions, no NVLink",
    ),
    "a10": Gpu(
        "A10", 125e12, 0.6e12, 32e9, 32e9, 22.0,
        "NVIDIA A10 datasheet: 125 TFLOPS BF16 dense, 600 GB/s, PCIe Gen4 64 GB/s both directions, "
        "no NVLink",
    ),
    "h200": Gpu(
        "H200-SXM-141GB", 989.4e12, 4.8e12, 450e9, 64e9, 139.8,
        "NVIDIA H200 datasheet (SXM): the H100's 989.4 TFLOPS BF16 dense, 4.8 TB/s, NVLink 900 "
        "GB/s both directions, PCIe Gen5 128 GB/s both directions",
    ),
    "b200": Gpu(
        "B200-SXM-180GB", 2250e12, 7.7e12, 900e9, 64e9, 178.0,
        "NVIDIA HGX B200 datasheet, an eighth: 2.25 PFLOPS BF16 dense, 7.7 TB/s, NVLink 1.8 TB/s "
        "both directions; PCIe Gen5 128 GB/s both directions",
    ),
    "mi300x": Gpu(
        "MI300X", 1307.4e12, 5.3e12, 448e9, 64e9, 191.7,
        "AMD Instinct MI300X datasheet: 1,307.4 TFLOPS BF16 dense, 5.3 TB/s, 7 Infinity Fabric "
        "links of 128 GB/s both directions, PCIe Gen5 128 GB/s both directions",
    ),
}  # fmt: skip
"""Of which the package has no profiles and no measured kernels: all about them is computed."""
ALL_GPUS = GPUS | MORE_GPUS
