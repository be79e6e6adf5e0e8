"""Speed of the INT8 kernels on a CUDA device.

Checks parity with the torch twin first and reports no speed when that fails. See README.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from harness.markdown import markdown
from harness.setup import Outcome, Setup

_ROOT = Path(__file__).resolve().parents[2]
_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 256, 16  # keys beside values
_MIB = 1 << 20
_QUANTILES = (0.2, 0.5, 0.8)
_HEAD = ("MiB of bf16 KV", "tokens a group", "kernel", "GB/s, slow fifth", "median", "fast fifth",
         "of a copy")  # fmt: skip


def parity() -> str | None:
    """Run the kernels' own tests where they run; None if they pass, else their last lines."""
    tests = _ROOT / "tests" / "kernels"
    marker = "" if torch.cuda.is_available() else "not gpu"
    command = [sys.executable, "-P", "-m", "pytest", "-q", str(tests), "-m", marker]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, check=False)
    return None if done.returncode == 0 else "\n".join(done.stdout.splitlines()[-8:])


def time_s(run: Callable[[], object], repeats: int = 30) -> list[float]:
    """Seconds of one call at `_QUANTILES`, by device events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    ordered = torch.tensor(sorted(times))
    return [float(ordered.quantile(q)) for q in _QUANTILES]


def measure(num_mib: int, group_tokens: int) -> list[list[str]]:
    """Rows of the table for one size: quantize, dequantize, and a copy of as many bytes."""
    from sola_sched.kernels import int8_kv
    from sola_sched.kernels.layout import allocate

    token_bytes = _KV_HEADS * _HEAD_DIM * 2
    num_tokens = num_mib * _MIB // token_bytes
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    shape = (2 * num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
    cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(2 * num_blocks, device="cuda")[:num_blocks]
    packed = allocate(
        num_tokens, _KV_HEADS, _HEAD_DIM, group_tokens=group_tokens, device=cache.device
    )
    moved = num_tokens * token_bytes + packed.num_bytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls = {
        "copy": lambda: target.copy_(source),
        "quantize": lambda: int8_kv.quantize_kv(
            cache, table, num_tokens=num_tokens, group_tokens=group_tokens, out=packed
        ),
        "dequantize": lambda: int8_kv.dequantize_kv(
            packed, cache, table, group_tokens=group_tokens
        ),
    }
    rows, copy_s = [], 0.0
    for name, call in calls.items():
        seconds = time_s(call)
        copy_s = seconds[1] if name == "copy" else copy_s
        cells = [f"{moved / s / 1e9:.0f}" for s in seconds]
        share = f"{100 * copy_s / seconds[1]:.0f} %"
        rows.append([str(num_mib), str(group_tokens), name, *cells, share])
    return rows


def speed(setup: Setup) -> Outcome:
    """GB/s of both kernels; ends with status 1 where parity is red."""
    failure = parity()
    if failure is not None:
        raise SystemExit(f"Parity with the torch twin is red; no speed is reported.\n{failure}")
    sizes, lines = setup.options["sizes"], []
    if torch.cuda.is_available():
        import triton

        device = torch.cuda.get_device_name()
        title = f"{device}, torch {torch.__version__}, triton {triton.__version__}"
        for size in sizes:
            for group in (16, 64):
                lines += measure(size, group)
    else:
        title = "No CUDA device: parity checked in Triton's interpreter, speed absent"
        for size in sizes:
            for name in ("copy", "quantize", "dequantize"):
                lines.append([str(size), "16, 64", name, *["absent"] * 4])
    return Outcome([], f"{title}.\n\n{markdown(_HEAD, lines, 0)}")
