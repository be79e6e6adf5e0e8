"""Length predictions of a gateway that sees prompts' lengths and outputs' ends, but no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import ClusterRequest

#: A request to a prediction that was made before, e.g. the truth; None leaves it to the gateway.
Predict = Callable[[ClusterRequest], LengthPrediction | None]

_UNTIL_KNOWN_TOKENS = 256.0
_REFRESH_EVERY = 32


class RecentLengths:
    """The distribution of the outputs that ended last.

    Args:
        memory: Outputs that are remembered.
    """

    def __init__(self, memory: int = 1000) -> None:
        self._lengths: deque[int] = deque(maxlen=memory)
        self._num_seen = 0
        self._prediction = LengthPrediction.exactly(_UNTIL_KNOWN_TOKENS, "histogram")

    def predict(self) -> LengthPrediction:
        """The same for every request until more have ended."""
        return self._prediction

    def observe(self, num_tokens: int) -> None:
        """An output has ended by itself."""
        self._lengths.append(num_tokens)
        self._num_seen += 1
        # Each of the first few changes much.
        if self._num_seen % min(_REFRESH_EVERY, 1 + self._num_seen // 4) == 0:
            self._prediction = LengthPrediction.of_samples(list(self._lengths), "histogram")


def true_lengths(request: ClusterRequest) -> LengthPrediction:
    """The length itself."""
    return LengthPrediction.exactly(request.request.output_len)
