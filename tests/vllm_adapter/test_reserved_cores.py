"""Swapping takes no core from the model: vLLM's CPU backend reserves as many as without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from needs import NEEDS_SWAPPING

from sola_sched.config.swap import CONNECTOR
from sola_sched.vllm_adapter.swap import plugin_swap

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_swap, "_own_reserve", None)
    monkeypatch.setenv(RESERVED, "0")  # so that it is put back
    monkeypatch.delenv(RESERVED)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


def args(connector: str | None = CONNECTOR, *, num_workers: int = 1) -> Any:
    return SimpleNamespace(
        kv_transfer_config=connector and {"kv_connector": connector},
        tensor_parallel_size=num_workers,
        pipeline_parallel_size=1,
        nnodes=1,
    )


def num_reserved(monkeypatch: pytest.MonkeyPatch, *, swaps: bool, num_workers: int) -> int:
    """What vLLM itself makes of the configuration."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    monkeypatch.setattr(OMPProcessManager, "_parse_omp_threads_bind_env", lambda self: None)
    monkeypatch.setattr(OMPProcessManager, "auto_setup", True, raising=False)
    parallel = SimpleNamespace(
        local_world_size=num_workers,
        data_parallel_rank_local=None,
        _api_process_count=1,
        assigned_physical_gpu_ids=None,  # read since 0.33
    )
    transfer = SimpleNamespace() if swaps else None
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    return OMPProcessManager(config).reserve_cpu_num


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_as_many_cores_are_reserved_as_without_swapping(num_workers, monkeypatch) -> None:
    stock = num_reserved(monkeypatch, swaps=False, num_workers=num_workers)
    before = num_reserved(monkeypatch, swaps=True, num_workers=num_workers)

    plugin_swap._reserve_cores(args(num_workers=num_workers))

    assert before > stock, "vLLM reserves more with a connector"
    assert num_reserved(monkeypatch, swaps=True, num_workers=num_workers) == stock


def test_the_operators_value_stands(monkeypatch) -> None:
    monkeypatch.setenv(RESERVED, "3")

    plugin_swap._reserve_cores(args())

    assert plugin_swap.os.environ[RESERVED] == "3"


@pytest.mark.parametrize("other", [None, "NixlConnector"])
def test_engines_with_another_connector_or_none_are_left_alone(other) -> None:
    plugin_swap._reserve_cores(args(other))

    assert RESERVED not in plugin_swap.os.environ


def test_a_later_engine_of_the_process_is_not_told_of_the_first() -> None:
    plugin_swap._reserve_cores(args())
    plugin_swap._reserve_cores(args(None))

    assert RESERVED not in plugin_swap.os.environ


def test_threads_that_the_operator_binds_need_no_reserve(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")

    plugin_swap._reserve_cores(args())

    assert RESERVED not in plugin_swap.os.environ
