"""Copies of swapped KV on a GPU.

Bandwidth of swapping out and in against pinned copies of as many bytes, and what copies under way
cost the steps of a model beside them. Checks round trips first and reports nothing when they are
wrong; without a CUDA device that is all it does. See README.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.setup import Outcome, Setup
from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.jobs import Job, Piece
from sola_sched.kv_swap.packing import Packer
from sola_sched.kv_swap.worker import SwapWorker

_BLOCK_SIZE, _SEGMENT_TOKENS, _GROUP_TOKENS = 16, 256, 64
_MIB = 1 << 20
_PEAK_BYTES = 256 * _MIB
#: Rounds of steps without and with copies, and steps of each.
_ROUNDS, _STEPS = 15, 20
_BATCH = 64


@dataclass(frozen=True)
class Shape:
    """KV of one GPU and the model beside it; by default Llama-3-8B."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336


TINY = Shape(num_layers=2, num_kv_heads=2, head_dim=8, hidden=32, inner=64)


class Swapped:
    """One request's KV, a worker, and the jobs that take it out and bring it back elsewhere.

    Args:
        num_tokens: A multiple of the tokens in a quantization group.
    """

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device, *, is_int8: bool):
        self.geometry = Geometry.of(
            [_BLOCK_SIZE],
            is_int8=is_int8,
            group_tokens=_GROUP_TOKENS if is_int8 else None,
            segment_tokens=_SEGMENT_TOKENS,
        )
        num_blocks = num_tokens // _BLOCK_SIZE
        size = (2 * num_blocks, shape.num_kv_heads, _BLOCK_SIZE, 2 * shape.head_dim)
        self.caches = [
            torch.randn(size, device=device).to(torch.bfloat16) for _ in range(shape.num_layers)
        ]
        packer = Packer(
            self.caches,
            2 * num_blocks,
            _BLOCK_SIZE,
            is_int8=is_int8,
            group_tokens=self.geometry.group_tokens,
        )
        slot_bytes = packer.image_bytes(self.geometry.slot_tokens)
        needed = self.geometry.num_slots(num_tokens) + num_tokens // _SEGMENT_TOKENS
        self.worker = SwapWorker(self.geometry, [packer], device, 2 * needed * slot_bytes)
        order = torch.randperm(2 * num_blocks).tolist()
        self.home, self.other = order[:num_blocks], order[num_blocks:]
        self.num_tokens, self._num_jobs, self._num_ended = num_tokens, 0, 0

    def submit(self, block_ids: Sequence[int], *, is_load: bool) -> None:
        """Order the copy of the whole request, as the scheduler cuts it."""
        pieces, slot = [], 0
        for first in range(0, self.num_tokens, _SEGMENT_TOKENS):
            end = min(first + _SEGMENT_TOKENS, self.num_tokens)
            count = self.geometry.num_slots(end - first)
            blocks = tuple(block_ids[first // _BLOCK_SIZE : -(-end // _BLOCK_SIZE)])
            slots = tuple(range(slot, slot + count))
            pieces.append(Piece(0, first, end - first, slots, first, end, blocks))
            slot += count
        self._num_jobs += 1
        self.worker.submit([Job(self._num_jobs, "r", is_load, tuple(pieces))])

    def poll(self) -> tuple[float, int] | None:
        """Seconds and bytes of the copy if it has ended since the last call."""
        report, _, failed = self.worker.poll()
        if failed or report.failed:
            raise RuntimeError("a copy failed; see the log above.")
        self._num_ended += len(report.num_ended)
        if not report.num_ended:
            return None
        return report.save_s + report.load_s, report.save_bytes + report.load_bytes

    def wait(self) -> tuple[float, int]:
        """Wait for the copy under way; its seconds and bytes."""
        while (ended := self.poll()) is None:
            time.sleep(1e-5)
        return ended

    def keep_busy(self, block_ids: Sequence[int], *, is_load: bool) -> None:
        """Order a copy where none is under way."""
        self.poll()
        if self._num_ended == self._num_jobs:
            self.submit(block_ids, is_load=is_load)

    def largest_error(self) -> float:
        """Out, and back into other blocks: the largest difference, in quantization steps if INT8.

        Raw copies must differ by 0, INT8 by half a step and what bf16 rounds.
        """
        self.submit(self.home, is_load=False)
        self.wait()
        self.submit(self.other, is_load=True)
        self.wait()
        worst = 0.0
        for cache in self.caches:
            before, after = cache[self.home].float(), cache[self.other].float()
            error = (before - after).abs()
            if self.geometry.is_int8:
                tokens = before.transpose(1, 2).flatten(0, 1)
                groups = tokens.unflatten(0, (-1, _GROUP_TOKENS))
                step = (groups.amax(1) - groups.amin(1)).clamp_min(1e-6) / 255
                error = error.transpose(1, 2).flatten(0, 1).unflatten(0, (-1, _GROUP_TOKENS))
                error = (error - 2.0**-8 * groups.abs()).clamp_min(0.0) / step[:, None]
            worst = max(worst, float(error.max()))
        return worst


def round_trips(shape: Shape, device: torch.device) -> str | None:
    """What is wrong with copies out and back in both modes; None if nothing is."""
    for is_int8, limit in ((False, 0.0), (True, 0.55)):
        swapped = Swapped(shape, 4 * _SEGMENT_TOKENS, device, is_int8=is_int8)
        error = swapped.largest_error()
        swapped.worker.close()
        if error > limit:
            how = (
                f"INT8 KV differs by {error:.2f} steps"
                if is_int8
                else f"raw KV differs by {error:.3g}"
            )
            return f"{how} after a round trip"
    return None


def peaks() -> dict[bool, float]:
    """GB/s of one pinned copy, to the host (False) and from it (True)."""
    host = torch.empty(_PEAK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_PEAK_BYTES, dtype=torch.uint8, device="cuda")
    found = {}
    for is_load, (target, source) in {False: (host, device), True: (device, host)}.items():
        seconds = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        found[is_load] = _PEAK_BYTES / statistics.median(seconds[2:]) / 1e9
    return found


def bandwidth(shape: Shape, device: torch.device) -> list[str]:
    """Table rows: bytes on the host over the time of the copy, of the peak, and what it takes of
    the thread that orders it."""
    peak, rows = peaks(), []
    for is_int8 in (False, True):
        for num_tokens in (256, 1024, 8192):
            swapped = Swapped(shape, num_tokens, device, is_int8=is_int8)
            for is_load in (False, True):
                seen, host_s = [], []
                for _ in range(12):
                    torch.cuda.synchronize()
                    start_s = time.perf_counter()
                    swapped.submit(swapped.home, is_load=is_load)
                    host_s.append(time.perf_counter() - start_s)
                    seconds, num_bytes = swapped.wait()
                    seen.append(num_bytes / seconds / 1e9)
                if not is_load:
                    swapped.largest_error()  # leaves an image for the loads
                speed = statistics.median(seen[2:])
                rows.append(
                    f"| {'INT8' if is_int8 else 'raw'} | {num_tokens} | "
                    f"{'in' if is_load else 'out'} | {num_bytes / _MIB:.0f} | {speed:.1f} | "
                    f"{peak[is_load]:.1f} | {100 * speed / peak[is_load]:.0f} % | "
                    f"{1e3 * statistics.median(host_s[2:]):.2f} |"
                )
                print(rows[-1], file=sys.stderr, flush=True)
            swapped.worker.close()
    return rows


def make_step(shape: Shape, device: torch.device) -> Callable[[], None]:
    """The matrix products of one decode step."""
    kv = 2 * shape.num_kv_heads * shape.head_dim
    sizes = (
        (shape.hidden, shape.hidden + kv),
        (shape.hidden, shape.hidden),
        (shape.hidden, 2 * shape.inner),
        (shape.inner, shape.hidden),
    )
    layers = [
        [torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes]
        for _ in range(shape.num_layers)
    ]
    inputs = {n: torch.randn(_BATCH, n, device=device, dtype=torch.bfloat16) for n, _ in sizes}

    def step() -> None:
        for layer in layers:
            for weight in layer:
                inputs[weight.shape[0]] @ weight

    return step


def interference(shape: Shape, device: torch.device, *, is_int8: bool) -> tuple[float, list[float]]:
    """Milliseconds of a step alone, and the ratios of steps with copies in both directions."""
    step = make_step(shape, device)
    out = Swapped(shape, 8192, device, is_int8=is_int8)
    back = Swapped(shape, 8192, device, is_int8=is_int8)
    back.largest_error()

    def steps_s(*, swaps: bool) -> float:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_STEPS):
            if swaps:
                out.keep_busy(out.home, is_load=False)
                back.keep_busy(back.other, is_load=True)
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _STEPS

    for swaps in (False, True):
        steps_s(swaps=swaps)
    pairs = [(steps_s(swaps=False), steps_s(swaps=True)) for _ in range(_ROUNDS)]
    alone = statistics.median(a for a, _ in pairs)
    return 1e3 * alone, sorted(b / a for a, b in pairs)


def transfer(setup: Setup) -> Outcome:
    """Speed of copies and what they cost; ends with status 1 where round trips are wrong."""
    on_gpu = torch.cuda.is_available()
    device, shape = (torch.device("cuda"), Shape()) if on_gpu else (torch.device("cpu"), TINY)
    wrong = round_trips(shape, device)
    if wrong is not None:
        raise SystemExit(f"{wrong}; no speed is reported.")
    lines = [
        "| mode | tokens | way | MiB on the host | GB/s | pinned copy, GB/s | of it | "
        "to order it, ms |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    if on_gpu:
        lines.insert(0, f"{torch.cuda.get_device_name()}, torch {torch.__version__}.\n")
        lines += bandwidth(shape, device)
        lines += ["", "| mode | step alone, ms | with copies both ways, ratio (fifth to fifth) |"]
        lines.append("| --- | ---: | ---: |")
        for is_int8 in (False, True):
            alone_ms, ratios = interference(shape, device, is_int8=is_int8)
            low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.2, 0.5, 0.8))
            lines.append(
                f"| {'INT8' if is_int8 else 'raw'} | {alone_ms:.2f} | "
                f"{middle:.3f} ({low:.3f} to {high:.3f}) |"
            )
    else:
        lines.insert(0, "No CUDA device: round trips checked on the CPU, speed absent.\n")
        for mode in ("raw", "INT8"):
            lines += [f"| {mode} | - | {way} | absent | absent | absent | absent | absent |"
                      for way in ("out", "in")]  # fmt: skip
        lines += ["", "| mode | step alone, ms | with copies both ways, ratio |"]
        lines += ["| --- | ---: | ---: |", "| raw, INT8 | absent | absent |"]
    return Outcome([], "\n".join(lines))
