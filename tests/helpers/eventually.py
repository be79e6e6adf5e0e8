"""Waiting for what a server or another process shows after a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(look: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """What `look` finds once that is true; what it found last, where it never is.

    Args:
        look: May raise an `OSError` or a `KeyError`, while what it looks for is not there.
    """
    limit = time.monotonic() + limit_s
    while True:
        try:
            found = look()
        except (OSError, KeyError):
            found = None
        if found or time.monotonic() > limit:
            return found
        time.sleep(0.1)
