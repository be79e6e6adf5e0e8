"""Machines that do not keep to their profile: the pace of a machine changes while it works.

The pace is a function of the time and the seed alone, so it is the same for every scheduler,
whatever steps it makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

#: The pace stays as it is for so long, seconds.
CELL_S = 0.05


@dataclass(frozen=True)
class Roughness:
    """In what a machine differs from its profile; by default in nothing.

    Attributes:
        jitter: Standard deviation of the logarithm of the pace from cell to cell.
        burst: In spells of `burst_s`, one in each `burst_every_s`, steps take so many times as
            long.
        drift: Over `drift_s` steps grow longer by this share, over as much again they shrink back.
        stall_s: For so long nothing goes on, once in each `stall_every_s`.
        host_s_per_request: What each request of a step adds to its time.
    """

    jitter: float = 0.0
    burst: float = 1.0
    burst_s: float = 2.0
    burst_every_s: float = 10.0
    drift: float = 0.0
    drift_s: float = 60.0
    stall_s: float = 0.0
    stall_every_s: float = 20.0
    host_s_per_request: float = 0.0

    def pace(self, cell: int, seed: int) -> float:
        """Work done per second in a cell, of that on a machine that keeps to its profile."""
        time_s = (cell + 0.5) * CELL_S
        if _is_in_spell(time_s, self.stall_s, self.stall_every_s, seed, 1):
            return 0.0
        slower = 1.0
        if self.burst != 1.0 and _is_in_spell(time_s, self.burst_s, self.burst_every_s, seed, 2):
            slower *= self.burst
        if self.drift:
            turn = time_s / self.drift_s % 2.0
            slower *= 1.0 + self.drift * min(turn, 2.0 - turn)
        if self.jitter:
            slower *= math.exp(self.jitter * _normal(cell, seed))
        return 1.0 / slower


#: By name.
ROUGHNESSES = {
    "jitter": Roughness(jitter=0.25),
    "bursts": Roughness(burst=1.6),
    "drift": Roughness(drift=0.3),
    "stalls": Roughness(stall_s=0.5),
    "host": Roughness(host_s_per_request=5e-5),
}


class RoughStepTime:
    """Step times of a machine whose pace changes; a `step_time` function for `VirtualEngine`.

    Args:
        exact: The step times of the profile.
        roughness: How the pace changes.
        seed: Of all that is left to chance.

    The machine is even until `begin`, so that engines may warm up for any time.
    """

    def __init__(self, exact: Any, roughness: Roughness, seed: int) -> None:
        self.exact, self.roughness, self.seed = exact, roughness, seed
        self._clock: Callable[[], float] = lambda: 0.0
        self._start_s = math.inf
        self._free_s = 0.0

    def begin(self, clock: Callable[[], float], start_s: float) -> None:
        """From this time on, the pace changes; the clock is the engine's."""
        self._clock, self._start_s = clock, start_s

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        """Seconds of the step `output`, which starts when that before it has ended."""
        work_s = float(self.exact(output, requests))
        work_s += self.roughness.host_s_per_request * len(output.num_scheduled_tokens)
        start_s = max(self._clock(), self._free_s)
        self._free_s = self.end_s(start_s, work_s)
        return self._free_s - start_s

    def end_s(self, start_s: float, work_s: float) -> float:
        """When work is done that takes so long at the pace of the profile."""
        if work_s <= 0.0 or start_s < self._start_s:
            return start_s + work_s
        cell = math.floor((start_s - self._start_s) / CELL_S)
        now_s = start_s
        while True:
            pace, ends_s = self.roughness.pace(cell, self.seed), self._start_s + (cell + 1) * CELL_S
            if pace * (ends_s - now_s) >= work_s:
                return now_s + work_s / pace
            work_s -= pace * max(0.0, ends_s - now_s)
            now_s, cell = max(now_s, ends_s), cell + 1


def _is_in_spell(time_s: float, length_s: float, every_s: float, seed: int, kind: int) -> bool:
    """Whether it is in the one spell of its period, which begins at random."""
    if not length_s:
        return False
    period = math.floor(time_s / every_s)
    start_s = period * every_s + _uniform(period, seed, kind) * (every_s - length_s)
    return start_s <= time_s < start_s + length_s


@lru_cache(maxsize=4096)
def _uniform(period: int, seed: int, kind: int) -> float:
    return float(np.random.default_rng([seed, 12, kind, period]).random())


def _normal(cell: int, seed: int) -> float:
    return float(_normals(cell // 1024, seed)[cell % 1024])


@lru_cache(maxsize=256)
def _normals(block: int, seed: int) -> Any:
    return np.random.default_rng([seed, 13, block]).standard_normal(1024)
