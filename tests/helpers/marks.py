"""Marks that several test modules share."""

from __future__ import annotations

import pytest

#: Left out of `.ci/run`, where one of its like runs; `make test-slow` runs it.
LONG = (pytest.mark.slow, pytest.mark.long)
#: Asynchronous scheduling, which is vLLM's default, and in the longest runs without it.
MODES = (
    pytest.param(True, id="async"),
    pytest.param(False, id="sync", marks=LONG),
)
