"""Values of a JSON body as vLLM reads them: numbers and yes or no may be written as strings."""

from __future__ import annotations

import math
from typing import Any

_YES = frozenset(("1", "on", "t", "true", "y", "yes"))


def number(value: Any) -> float | None:
    """A finite number; None for what is none, or is beyond what a float holds."""
    try:
        value = float(value) if isinstance(value, str) else value
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    except (OverflowError, ValueError):
        return None


def whole(value: Any) -> int | None:
    """A number without a fraction; None for what is none."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def flag(value: Any) -> bool:
    """Whether it means yes."""
    return value.lower() in _YES if isinstance(value, str) else bool(value)
