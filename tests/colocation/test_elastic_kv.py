"""What is said of kvcached."""

from __future__ import annotations

import pytest

from sola_sched.colocation import elastic_kv
from sola_sched.colocation.elastic_kv import SWITCHES, ElasticKv, status


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ElasticKv("0.1.6", False, (), "0.24.0"), "needs a GPU"),
        (ElasticKv("", True, (), "0.24.0"), "pip install kvcached"),
        (ElasticKv("0.1.6", True, ("KVCACHED_AUTOPATCH",), "0.24.0"), "with KVCACHED_AUTOPATCH=1."),
        (ElasticKv("0.1.6", True, (), "0.24.0"), "shared through kvcached 0.1.6"),
        (
            ElasticKv("0.1.6", True, (), "0.32.0"),
            "0.1.6 is installed; not verified with vLLM 0.32.0: it was tested with 0.8.4 to 0.24.",
        ),
        (ElasticKv("0.1.6", True, (), ""), "not verified with vLLM (none found)"),
    ],
)
def test_it_says_what_is_missing(found: ElasticKv, words: str) -> None:
    assert words in str(found)
    assert found.is_usable == str(found).startswith("KV memory is shared")


@pytest.mark.parametrize(
    ("vllm", "is_known"),
    [
        ("0.8.3", False),
        ("0.8.4", True),
        ("0.8.5.post1", True),
        ("0.9", True),
        ("0.24.1+cu129", True),
        ("0.25.0rc1", False),
        ("0.28.0", False),
        ("0.33.0", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_which_versions_of_vllm_it_was_tested_with(vllm: str, is_known: bool) -> None:
    found = ElasticKv("0.1.6", True, (), vllm)

    assert found.knows_vllm == is_known
    assert found.is_usable == is_known


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kvcached": "0.1.6", "vllm": "0.24.0"}
    monkeypatch.setattr(elastic_kv, "_version", versions.__getitem__)

    assert status({}, has_gpu=True).switches_off == tuple(SWITCHES)
    assert status({**SWITCHES, "ENABLE_KVCACHED": "TRUE"}, has_gpu=True).is_usable
    assert not status(SWITCHES, has_gpu=False).is_usable
    versions["vllm"] = "0.32.0"
    assert not status(SWITCHES, has_gpu=True).is_usable
