"""What the service monitor knows: execution times of requests alone (SeaLLM, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.cluster.sharing.allocation import least_degree
from sola_sched.cluster.sharing.placement import Cluster
from sola_sched.cluster.sharing.queue import Habits, expected_left
from sola_sched.cluster.sharing.services import Service
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.sharing.hardware import Hardware

#: Past requests of a service that are looked at.
_MOST_SAMPLES = 500


def alone_s(steps: BatchTime, prompt: int, output: int, chunk: int) -> float:
    """Seconds of a request that has the GPUs for itself, from its first step to its last token."""
    seconds, done = 0.0, 0
    while done < prompt:
        tokens = min(chunk, prompt - done)
        seconds += steps.step_s(0, 0, tokens, float(tokens * tokens), float(tokens * done))
        done += tokens
    constant_s, per_ctx_s = steps.decode_line(1)
    decodes = output - 1
    return seconds + decodes * (constant_s + per_ctx_s * (prompt + 0.5 * (decodes - 1)))


@dataclass(frozen=True)
class Profile:
    """A service's execution times on the fewest GPUs that hold it: the paper's on one GPU.

    Attributes:
        degree: Those GPUs.
        mean_s: L_s, Eq. 1.
        std_s: Var_s.
        left: See `Habits`.
    """

    degree: int
    mean_s: float
    std_s: float
    left: Sequence[float]

    def habits(self, steps: BatchTime, mean_prompt: float) -> Habits:
        """For the turns on a group with these step times."""
        prompt = max(1.0, mean_prompt)
        token_s = steps.step_s(0, 0, prompt, prompt * prompt, 0.0) / prompt
        return Habits(self.mean_s, self.std_s, self.left, token_s)


def profile(
    services: Mapping[str, Service], hardware: Hardware, cluster: Cluster, chunk: int
) -> dict[str, Profile]:
    """Each service's profile, by name.

    Raises:
        InfeasibleError: A service fits on no node.
    """
    found = {}
    for name, service in services.items():
        degree = least_degree(service, cluster, hardware.fits)
        steps = hardware.steps(service.model, degree)
        every = max(1, math.ceil(len(service.lengths) / _MOST_SAMPLES))
        sample = list(service.lengths)[::every]
        times = np.array([alone_s(steps, prompt, output, chunk) for prompt, output in sample])
        left = expected_left([output for _, output in sample])
        found[name] = Profile(degree, float(times.mean()), float(times.std()), left)
    return found
