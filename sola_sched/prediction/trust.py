"""Whether length predictions are worth more than what finished requests say by themselves.

A predictor that was built for another model or other traffic, or that has gone wrong, may be worse
than no predictor. Both guesses at a request's length, the predictor's and the histogram's, are
compared with the truth when it ends; while the predictor's are much worse, nobody uses them. They
are still compared, so that a predictor that has learned is used again. Much worse, because equally
large errors are not equally bad: the predictor tells single requests apart, and the histogram's
guesses are near the middle for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Requests compared before predictions can be distrusted.
_MIN_COMPARED = 20
#: Requests that the running means remember.
_MEMORY = 100
#: Predictions are used up to so many times the histogram's error, and used again below the latter:
#: no flapping.
_TOLERATED, _REGAINED = 1.5, 1.35


@dataclass(slots=True)
class PredictionTrust:
    """Errors of the predictor and of the histogram, over requests that ended by themselves.

    Attributes:
        error: Running mean of abs(log(predicted median / true length)); NaN before the first.
        usual_error: The same of the histogram's median.
        is_trusted: Whether predictions are to be used.
        num_compared: Requests compared so far.
    """

    error: float = math.nan
    usual_error: float = math.nan
    is_trusted: bool = True
    num_compared: int = 0

    def compare(self, predicted: float, usual: float, actual: int, limit: int) -> bool:
        """Book one request.

        Args:
            predicted: The predictor's median, tokens, >= 1.
            usual: The histogram's median for such a request, tokens, >= 1.
            actual: Output tokens, >= 1.
            limit: Most that it could generate: a guess beyond counts as this one.

        Returns:
            Whether `is_trusted` has changed.
        """
        self.num_compared += 1
        error, usual_error = (
            abs(math.log(min(guess, limit) / actual)) for guess in (predicted, usual)
        )
        if self.num_compared == 1:
            self.error, self.usual_error = error, usual_error
        weight = max(1.0 / self.num_compared, 1.0 / _MEMORY)
        self.error += weight * (error - self.error)
        self.usual_error += weight * (usual_error - self.usual_error)
        if self.num_compared < _MIN_COMPARED:
            return False
        was_trusted = self.is_trusted
        most = _TOLERATED if was_trusted else _REGAINED
        self.is_trusted = self.error <= most * self.usual_error
        return self.is_trusted != was_trusted
