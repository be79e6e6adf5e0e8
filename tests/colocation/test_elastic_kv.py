"""What is said of kvcached."""

from __future__ import annotations

import pytest

from sola_sched.colocation import elastic_kv
from sola_sched.colocation.elastic_kv import SWITCHES, ElasticKv, status


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ElasticKv("0.1.6", False, ()), "needs a GPU"),
        (ElasticKv("", True, ()), "pip install kvcached"),
        (ElasticKv("0.1.6", True, ("KVCACHED_AUTOPATCH",)), "with KVCACHED_AUTOPATCH=1."),
        (ElasticKv("0.1.6", True, ()), "shared through kvcached 0.1.6"),
    ],
)
def test_it_says_what_is_missing(found: ElasticKv, words: str) -> None:
    assert words in str(found)
    assert found.is_usable == str(found).startswith("KV memory is shared")


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_kv, "_version", lambda name: "0.1.6")

    assert status({}, has_gpu=True).switches_off == tuple(SWITCHES)
    assert status({**SWITCHES, "ENABLE_KVCACHED": "TRUE"}, has_gpu=True).is_usable
    assert not status(SWITCHES, has_gpu=False).is_usable
