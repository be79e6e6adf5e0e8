"""The largest KV memory that a set of requests will take together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def peak_tokens(held: FloatArray, left: FloatArray) -> float:
    """Memory at the worst future step, tokens; 0 without requests.

    Each request grows by one token a step and frees everything at its end, so the sum grows until
    a request ends: it is enough to look at the ends. With the requests in order of what is left,
    longest first, the k-th end finds k requests that have grown by left_k each.

    Args:
        held: Tokens of each request now [r].
        left: Tokens that it will generate yet [r].

    Source: Aladdin, constraint (e); the computation is that of LightLLM (R. Gong et al., ASPLOS
    2025).
    """
    if not len(held):
        return 0.0
    order = np.argsort(-left)
    alive = np.arange(1, len(held) + 1)
    return float((np.cumsum(held[order]) + alive * left[order]).max())
