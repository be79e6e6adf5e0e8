"""Marks that several test modules share; import vLLM first."""

from __future__ import annotations

import pytest

from sola_sched.vllm_adapter.swap.plugin_swap import missing_hooks

#: More of vLLM than every supported release has.
NEEDS_SWAPPING = pytest.mark.skipif(
    bool(missing_hooks()), reason="KV swapping takes vLLM 0.32 or later"
)
