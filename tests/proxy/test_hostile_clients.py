"""A hundred honest streams beside each kind of hostile client, as `benchmarks/run.py hostile`."""

from __future__ import annotations

import asyncio
import os

import pytest

pytest.importorskip("aiohttp")

from gateway.hostile import beside
from gateway.hostile_clients import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

#: Of a machine that others use too; bodies of 10 MB used to stop all streams for six seconds.
_MOST_GAP_S = 3.0
_MOST_MIB = 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_honest_streams_go_on_beside_hostile_clients(kind: str) -> None:
    row = asyncio.run(beside(kind))

    print(f"\n{row}")
    assert row["longest_gap_s"] < _MOST_GAP_S
    assert row["gateway_mib"] < _MOST_MIB
