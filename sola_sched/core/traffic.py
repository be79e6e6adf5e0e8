"""What has come of late."""

from __future__ import annotations

import math
from collections import deque

#: Requests that are remembered, and how many tell enough.
NUM_REMEMBERED, NUM_ENOUGH = 256, 32


class RecentTraffic:
    """Remembers the last arrivals and outputs."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED)
        self._outputs: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._num_prompt = self._num_output = 0

    def came(self, arrival_s: float, num_prompt_tokens: int) -> None:
        """A request came, with so many tokens of its prompt to compute.

        One that another engine had before, or that was long on its way, came when the last one did.
        """
        if self._came:
            arrival_s = max(arrival_s, self._came[-1][0])
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

    def means(self) -> tuple[int, float, float, float, float]:
        """Arrivals, when the first and the last were, mean prompt, mean output; NaN of none."""
        count, first_s, last_s, prompt, output = len(self._came), *[math.nan] * 4
        if count:
            first_s, last_s = self._came[0][0], self._came[-1][0]
            prompt = self._num_prompt / count
        if self._outputs:
            output = self._num_output / len(self._outputs)
        return count, first_s, last_s, prompt, output
