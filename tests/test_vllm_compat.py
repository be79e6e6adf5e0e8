"""The version range and its errors; no vLLM is needed here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sola_sched.errors import IncompatibleVllmError
from sola_sched.vllm_compat import Seams, check_version


@pytest.mark.parametrize("version", ["0.28.0", "0.31.2", "0.32.0+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    assert check_version(version)[0] == 0


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range_and_a_way_out(version: str) -> None:
    with pytest.raises(IncompatibleVllmError, match=r"0\.28 to 0\.33 \(found vLLM .*pip install"):
        check_version(version)


def test_a_scheduler_without_the_seams_is_refused_by_their_names() -> None:
    with pytest.raises(IncompatibleVllmError, match="running, waiting"):
        Seams(SimpleNamespace())
