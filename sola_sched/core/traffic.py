"""What has come of late, and how much of an engine's time it asks for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

#: Requests that are remembered, and how many tell enough.
NUM_REMEMBERED, NUM_ENOUGH = 256, 32


class Load(NamedTuple):
    """Shares of an engine's time that the traffic takes, if every decode has the pace of a target.

    Attributes:
        decodes: Bare steps of the decodes.
        total: Those and the prompts; above 1 more comes than can be served at that pace.
    """

    decodes: float
    total: float


class RecentTraffic:
    """Remembers the last arrivals and outputs."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED)
        self._outputs: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._num_prompt = self._num_output = 0

    def came(self, arrival_s: float, num_prompt_tokens: int) -> None:
        """A request came, with so many tokens of its prompt to compute."""
        if len(self._came) == NUM_REMEMBERED:
            self._num_prompt -= self._came[0][1]
        self._came.append((arrival_s, num_prompt_tokens))
        self._num_prompt += num_prompt_tokens

    def ended(self, num_output: int) -> None:
        """One ended by itself with so many tokens."""
        if len(self._outputs) == NUM_REMEMBERED:
            self._num_output -= self._outputs[0]
        self._outputs.append(num_output)
        self._num_output += num_output

    def means(self) -> tuple[int, float, float, float]:
        """Arrivals, when the first of them was, the mean prompt, the mean output; NaN of none."""
        count, first_s, prompt, output = len(self._came), math.nan, math.nan, math.nan
        if count:
            first_s, prompt = self._came[0][0], self._num_prompt / count
        if self._outputs:
            output = self._num_output / len(self._outputs)
        return count, first_s, prompt, output

    def load(
        self,
        now_s: float,
        step_s: float,
        *,
        tokens_per_step: float,
        decode_s: Callable[[float, float], float],
        prefill_s: Callable[[float], float],
    ) -> Load | None:
        """What the traffic takes of the time; by Little's law, as of a fluid.

        Args:
            now_s: On the clock of the arrivals.
            step_s: The pace: so long may a step be, seconds.
            tokens_per_step: Output tokens of a request in it.
            decode_s: Time of a step of so many decodes with so many KV tokens in all, seconds.
            prefill_s: What a prompt of so many tokens adds to steps, seconds.

        Returns:
            None where too little has come, nothing has ended, or the pace is none.
        """
        count, first_s, prompt, output = self.means()
        if count < NUM_ENOUGH or math.isnan(output) or not 0.0 < step_s < math.inf:
            return None
        rate_per_s = count / max(now_s - first_s, 1e-9)
        num_decodes = rate_per_s * output / tokens_per_step * step_s
        decodes = decode_s(num_decodes, num_decodes * (prompt + 0.5 * output)) / step_s
        return Load(decodes, decodes + rate_per_s * prefill_s(prompt))
