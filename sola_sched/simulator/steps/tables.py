"""Step time interpolated in kernel times that were measured on a GPU."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sola_sched.errors import ProfileError
from sola_sched.simulator.steps.time import StepCounts

#: Key of the tables in a profile.
SECTION = "step_tables"

Points = tuple[tuple[float, float], ...]

_CURVES = {
    "tokens": ("tokens of the step, padded", "matrix products, all-reduces, elementwise work"),
    "requests": ("requests of the step", "output layer"),
    "pairs": ("pairs of a prompt token and one it attends to", "attention of chunks"),
}


def graph_size(num_tokens: int, max_graph_tokens: int) -> int:
    """Tokens that vLLM computes for so many: the next size for which it has a CUDA graph.

    vLLM 0.32 captures 1, 2, 4, the multiples of 8 to 256 and those of 16 to `max_graph_tokens`
    (`VllmConfig._set_cudagraph_sizes`; min(2 x max_num_seqs, 512) by default). A larger step runs
    without a graph, as it is. `max_graph_tokens` 0 stands for no graphs.
    """
    if num_tokens > max_graph_tokens or num_tokens <= 2:
        return num_tokens
    unit = 4 if num_tokens <= 4 else 8 if num_tokens <= 256 else 16
    return min(max_graph_tokens, -(-num_tokens // unit) * unit)


@dataclass(frozen=True, slots=True)
class StepTables:
    """Measured step time; an instance is a `step_time` function for `VirtualEngine`.

    With N tokens and R requests in a step, D of them decodes that read T tokens of context, n
    prompt tokens, and P pairs of one of these and a token it attends to,

        t = host_s + attention_s + tokens(pad(N)) + requests(R) + decode(D, T)
          + pairs(P) + per_prompt_token_s * n

    where `pad` is `graph_size`, curves are piecewise linear and `decode` is bilinear. None of them
    falls: more work never takes less time. Beyond its last point a curve goes on with its last
    slope. As in `StepTimeModel` one token counts as a decode.

    Attributes:
        host_s: Of any step, beside the kernels, seconds.
        attention_s: The shortest attention kernel, all layers; `decode` and `pairs` are beyond it.
        tokens, requests, pairs: Points (value, seconds), ascending.
        decode_requests, decode_context: Grid of `decode`, ascending.
        decode_s: Seconds, a row for each of `decode_requests`.
        per_prompt_token_s: Attention of a chunk beside its pairs, seconds per token.
        max_graph_tokens: Steps of up to so many tokens are padded.
    """

    host_s: float
    attention_s: float
    tokens: Points
    requests: Points
    pairs: Points
    decode_requests: tuple[float, ...]
    decode_context: tuple[float, ...]
    decode_s: tuple[tuple[float, ...], ...]
    per_prompt_token_s: float
    max_graph_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("host_s", "attention_s", "per_prompt_token_s", "max_graph_tokens"):
            _require(0 <= getattr(self, name) < math.inf, name, "be finite and >= 0")
        for name in _CURVES:
            _check_curve(name, getattr(self, name))
        grid = (self.decode_requests, self.decode_context)
        _require(
            len(self.decode_s) == len(grid[0])
            and all(len(row) == len(grid[1]) for row in self.decode_s),
            "decode",
            "have a row of seconds for each number of requests",
        )
        for row in self.decode_s:
            _check_curve("decode", tuple(zip(grid[1], row, strict=True)))
        for column in zip(*self.decode_s, strict=True):
            _check_curve("decode", tuple(zip(grid[0], column, strict=True)))

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        """Seconds of the step `output`; arguments as for `StepTimeModel`."""
        return self.seconds(StepCounts.of(output, requests))

    def seconds(self, counts: StepCounts) -> float:
        """Seconds of a step with this work; 0 without tokens."""
        num_tokens = counts.num_decodes + counts.prefill_tokens
        if not num_tokens:
            return 0.0
        return (
            self.host_s
            + self.attention_s
            + _at(self.tokens, graph_size(num_tokens, self.max_graph_tokens))
            + _at(self.requests, counts.num_decodes + counts.num_prefills)
            + (self._decode(counts.num_decodes, counts.decode_ctx) if counts.num_decodes else 0.0)
            + (_at(self.pairs, counts.pairs) if counts.num_prefills else 0.0)
            + self.per_prompt_token_s * counts.prefill_tokens
        )

    def _decode(self, num_decodes: int, context: int) -> float:
        grid = self.decode_requests
        last = min(max(1, bisect_left(grid, num_decodes)), len(grid) - 1)
        low, high = (self._decode_row(index, context) for index in (last - 1, last))
        share = (num_decodes - grid[last - 1]) / (grid[last] - grid[last - 1])
        # Beyond the table each further one costs what it does with the least context.
        more_s = self.decode_s[last][0] - self.decode_s[last - 1][0]
        return low + min(max(0.0, share), 1.0) * (high - low) + max(0.0, share - 1.0) * more_s

    def _decode_row(self, index: int, context: int) -> float:
        grid, row = self.decode_context, self.decode_s[index]
        last = min(max(1, bisect_left(grid, context)), len(grid) - 1)
        slope = (row[last] - row[last - 1]) / (grid[last] - grid[last - 1])
        return row[last - 1] + max(0.0, context - grid[last - 1]) * slope

    def to_json(self) -> dict[str, Any]:
        """Plain data with what each part is."""
        curves = {
            name: {"of": of, "is": what, "points": [list(point) for point in getattr(self, name)]}
            for name, (of, what) in _CURVES.items()
        }
        return {
            "unit": "s",
            "max_graph_tokens": self.max_graph_tokens,
            "host_s": self.host_s,
            "attention_s": self.attention_s,
            "per_prompt_token_s": self.per_prompt_token_s,
            **curves,
            "decode": {
                "of": "decodes, and context tokens that all of them read",
                "is": "attention of decodes",
                "requests": list(self.decode_requests),
                "context": list(self.decode_context),
                "seconds": [list(row) for row in self.decode_s],
            },
        }

    @classmethod
    def from_json(cls, stored: Any) -> StepTables:
        """Read what `to_json` gave.

        Raises:
            ProfileError: Something is missing, or would let a step get faster with more work.
        """
        try:
            decode = stored["decode"]
            curves = {
                name: tuple((float(x), float(y)) for x, y in stored[name]["points"])
                for name in _CURVES
            }
            return cls(
                host_s=float(stored["host_s"]),
                attention_s=float(stored["attention_s"]),
                decode_requests=tuple(map(float, decode["requests"])),
                decode_context=tuple(map(float, decode["context"])),
                decode_s=tuple(tuple(map(float, row)) for row in decode["seconds"]),
                per_prompt_token_s=float(stored["per_prompt_token_s"]),
                max_graph_tokens=int(stored["max_graph_tokens"]),
                **curves,
            )
        except ProfileError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"'{SECTION}' must hold what `python -m sola_sched.simulator.steps.measured` "
                f"writes ({type(error).__name__}: {error})."
            ) from error


def _at(points: Points, value: float) -> float:
    last = min(max(1, bisect_left(points, (value,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[last - 1], points[last]
    return y0 + max(0.0, value - x0) * (y1 - y0) / (x1 - x0)


def _check_curve(name: str, points: Points) -> None:
    pairs = list(pairwise(points))
    _require(
        bool(pairs)
        and points[0][0] >= 0.0
        and points[0][1] >= 0.0
        and all(x0 < x1 and y0 <= y1 < math.inf for (x0, y0), (x1, y1) in pairs),
        name,
        "have two points or more, ascending from >= 0, and seconds that never fall",
    )


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ProfileError(f"'{SECTION}.{name}' must {rule}; build the profile again.")
