"""Kernel times that others measured, read from files and interpolated.

The files hold one operator of one layer on one GPU a row: `kernel_gemm`, `kernel_attention` and
`kernel_all_reduce`, gzipped CSV (columns in `KernelTables.read`). Between measured sizes times are
linear.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import ProfileError

FloatArray = NDArray[np.float64]

_MAX_KV_HEADS = 8


@dataclass(frozen=True)
class Curve:
    """Seconds over sizes, ascending."""

    sizes: FloatArray
    seconds: FloatArray

    def at(self, sizes: FloatArray | float) -> FloatArray:
        """Interpolated; beyond the ends the first value and the last slope go on."""
        x, y = self.sizes, self.seconds
        values: FloatArray = np.asarray(np.interp(sizes, x, y))
        if len(x) > 1:
            slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
            values = values + slope * np.maximum(0.0, np.asarray(sizes) - x[-1])
        return values


def monotone(values: FloatArray) -> FloatArray:
    """Rows that never fall and have the least largest distance from the given ones.

    Half of the running maximum from the left and of the running minimum from the right.
    """
    highest = np.maximum.accumulate(values, axis=-1)
    lowest = np.flip(np.minimum.accumulate(np.flip(values, -1), axis=-1), -1)
    result: FloatArray = 0.5 * (highest + lowest)
    return result


@dataclass(frozen=True)
class KernelTables:
    """Measured times of one GPU.

    Attributes:
        gpu: `a100` or `h100`.
        gemm: Seconds by (output width, input width), then tokens.
        prefill: Seconds by (query heads, KV heads), then (prompts, tokens of each).
        decode: The same, then (requests, context of each).
        all_reduce: Seconds by GPUs, then elements: the fastest of the ways vLLM has.
    """

    gpu: str
    gemm: dict[tuple[int, int], dict[int, float]]
    prefill: dict[tuple[int, int], dict[tuple[int, int], float]]
    decode: dict[tuple[int, int], dict[tuple[int, int], float]]
    all_reduce: dict[int, dict[int, float]]

    @classmethod
    def read(cls, folder: Path, gpu: str) -> KernelTables:
        """Read the three files of a folder.

        Columns: `gpu`, `latency_ms`, and `m`, `n`, `k` (tokens, output, input width); `op`,
        `batch_size`, `context`, `num_heads`, `num_key_value_heads` (`prefill` of whole prompts, or
        `decode`); `kind`, `num_gpus`, `message_elements`.

        Raises:
            ProfileError: A file is missing, or has no row of this GPU.
        """
        tables = cls(gpu, {}, {}, {}, {})
        for row in _rows(folder, "kernel_gemm", gpu):
            of_shape = tables.gemm.setdefault((int(row["n"]), int(row["k"])), {})
            of_shape[int(row["m"])] = _seconds(row)
        for row in _rows(folder, "kernel_attention", gpu):
            kind = {"prefill": tables.prefill, "decode": tables.decode}[row["op"]]
            heads = int(row["num_heads"]), int(row["num_key_value_heads"])
            kind.setdefault(heads, {})[int(row["batch_size"]), int(row["context"])] = _seconds(row)
        for row in _rows(folder, "kernel_all_reduce", gpu):
            if row["kind"] == "vLLM_custom_eager":
                continue
            by_size = tables.all_reduce.setdefault(int(row["num_gpus"]), {})
            size = int(row["message_elements"])
            by_size[size] = min(by_size.get(size, np.inf), _seconds(row))
        return tables

    def thinned(self) -> KernelTables:
        """Without every second token count, batch size, context and message size.

        The smallest and the largest stay. For errors against rows that a curve has not seen.
        """
        sizes = {m for by_size in self.gemm.values() for m in by_size}
        messages = {m for by_size in self.all_reduce.values() for m in by_size}
        prompts = {n for rows in self.prefill.values() for _, n in rows}
        contexts = {n for rows in self.decode.values() for _, n in rows}
        batches = {b for rows in self.decode.values() for b, _ in rows}
        m_kept, messages_kept, prompts_kept, contexts_kept, batches_kept = map(
            every_second, (sizes, messages, prompts, contexts, batches)
        )
        return KernelTables(
            self.gpu,
            {key: _kept(rows, m_kept.__contains__) for key, rows in self.gemm.items()},
            {
                key: {(b, n): s for (b, n), s in rows.items() if n in prompts_kept}
                for key, rows in self.prefill.items()
            },
            {
                key: {
                    (b, n): s
                    for (b, n), s in rows.items()
                    if b in batches_kept and n in contexts_kept
                }
                for key, rows in self.decode.items()
            },
            {key: _kept(rows, messages_kept.__contains__) for key, rows in self.all_reduce.items()},
        )

    def gemm_curve(self, n: int, k: int) -> Curve:
        """Seconds of a matrix product over its tokens; widths are interpolated.

        Wider than any measured one, the time goes with the width.
        """
        widths = sorted({width for width, _ in self.gemm})
        depths = sorted({depth for _, depth in self.gemm})
        wide = min(n, widths[-1])
        corners = [
            (share, self.gemm[width, depth])
            for width, of_width in _neighbours(widths, wide)
            for depth, of_depth in _neighbours(depths, k)
            if (share := of_width * of_depth) > 0.0
        ]
        sizes = sorted(set.intersection(*(set(by_size) for _, by_size in corners)))
        seconds = [sum(share * by_size[m] for share, by_size in corners) for m in sizes]
        return Curve(np.array(sizes, float), np.array(seconds) * (n / wide))

    def prefill_rows(self, heads: int, kv_heads: int) -> list[tuple[int, int, float]]:
        """(prompts, tokens of each, seconds), for one layer.

        Head counts that were not measured are interpolated between those with as many query heads
        a KV head.
        """
        if (heads, kv_heads) in self.prefill:
            corners = [(1.0, self.prefill[heads, kv_heads])]
        else:
            group = heads // kv_heads
            known = sorted(h for h, kv in self.prefill if h == kv * group)
            corners = [(w, self.prefill[h, h // group]) for h, w in _neighbours(known, heads)]
        sizes = sorted(set.intersection(*(set(rows) for _, rows in corners)))
        return [(b, n, sum(share * rows[b, n] for share, rows in corners)) for b, n in sizes]

    def decode_curves(self, heads: int, kv_heads: int) -> list[tuple[float, Curve]]:
        """Requests, and seconds of one layer over the context that they read in all.

        More than eight KV heads are as many more requests with eight: what a request costs is its
        KV heads.
        """
        factor = max(1.0, kv_heads / _MAX_KV_HEADS)
        key = (round(heads / factor), round(kv_heads / factor))
        by_batch: dict[int, list[tuple[int, float]]] = {}
        for (batch, context), seconds in sorted(self.decode[key].items()):
            by_batch.setdefault(batch, []).append((batch * context, seconds))
        return [
            (batch / factor, Curve(*(np.array(rows, float) / [factor, 1.0]).T))
            for batch, rows in by_batch.items()
        ]

    def all_reduce_curve(self, num_gpus: int) -> Curve:
        """Seconds of one all-reduce over its 16-bit elements."""
        by_size = sorted(self.all_reduce[num_gpus].items())
        return Curve(*np.array(by_size, float).T)


def every_second(values: set[int]) -> set[int]:
    """The smallest, the third, the fifth... and the largest."""
    ascending = sorted(values)
    return {*ascending[::2], *ascending[-1:]}


def _kept(rows: dict[int, float], is_kept: Callable[[int], bool]) -> dict[int, float]:
    return {size: seconds for size, seconds in rows.items() if is_kept(size)}


def _neighbours(known: list[int], value: int) -> Iterator[tuple[int, float]]:
    """The known values around one and their shares in it."""
    if not known[0] <= value <= known[-1]:
        raise ProfileError(
            f"A measured size must lie on both sides of {value} (there are {known[0]} to "
            f"{known[-1]}); such a model needs tables of its own."
        )
    high = next(known_value for known_value in known if known_value >= value)
    low = max(known_value for known_value in known if known_value <= value)
    share = (value - low) / (high - low) if high > low else 0.0
    yield low, 1.0 - share
    yield high, share


def _rows(folder: Path, name: str, gpu: str) -> Iterator[dict[str, str]]:
    path = folder / f"{name}.csv.gz"
    if not path.is_file():
        raise ProfileError(f"The folder of kernel times must hold {name}.csv.gz (got {folder}).")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    if not rows:
        raise ProfileError(f"{path} must hold rows of {gpu!r} (got none).")
    yield from rows


def _seconds(row: dict[str, str]) -> float:
    return float(row["latency_ms"]) * 1e-3
