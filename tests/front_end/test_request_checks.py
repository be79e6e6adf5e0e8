"""Requests with bad targets are refused by servers of ours, and by no others."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.front_end.request_checks import _remember, check_request
from sola_sched.front_end.scheduler_class import is_ours
from sola_sched.vllm_adapter.plugin import register

pytestmark = pytest.mark.vllm


def vllm_config(scheduler_cls: Any, **sola: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls),
        additional_config={"sola_sched": sola},
    )


def test_the_plugin_checks_requests_of_our_schedulers_only() -> None:
    bad = {"ttft_slo_ms": "soon"}
    check_request(vllm_config(None), bad)
    check_request(vllm_config(AsyncScheduler), bad)
    check_request(vllm_config("sola_sched.Scheduler"), {"ttft_slo_ms": 100})
    for ours in ("sola_sched.Scheduler", sola_sched.Scheduler):
        with pytest.raises(Exception, match=r"'ttft_slo_ms' must be .* \(got 'soon'\)") as caught:
            check_request(vllm_config(ours), bad)
        assert type(caught.value).__name__ == "VLLMValidationError"
    classes = {"chat": {"ttft_s": 0.5}}
    check_request(vllm_config("sola_sched.Scheduler", classes=classes), {"slo_class": "chat"})


def test_a_users_own_subclass_is_recognised() -> None:
    class Mine(sola_sched.Scheduler):
        pass

    assert is_ours(Mine)
    assert not is_ours("vllm.v1.core.sched.scheduler.Scheduler")


def test_registering_twice_wraps_once() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    register()
    first = InputProcessor._validate_params
    register()
    assert InputProcessor._validate_params is first


class Server:
    def __init__(self, scheduler_cls: Any, **sola: Any) -> None:
        self.vllm_config = vllm_config(scheduler_cls, **sola)


def test_sampling_params_are_refused_early_where_every_server_would() -> None:
    register()
    SamplingParams(extra_args={"ttft_slo_ms": "soon"})
    servers = [
        Server(None),
        Server("sola_sched.Scheduler"),
        Server("sola_sched.Scheduler", classes={"chat": {"ttft_s": 0.5}}),
    ]
    for server in servers:
        _remember(server)
    SamplingParams(extra_args={"ttft_slo_ms": 500, "other": "soon"})
    SamplingParams(extra_args={"slo_class": "chat"})
    SamplingParams(extra_args={"e2e_slo_ms": 60_000, "ttft_slo_ms": "none"})
    for bad in ({"ttft_slo_ms": "soon"}, {"slo_class": "chit"}, {"e2e_slo_ms": 100}):
        with pytest.raises(Exception, match=f"'{next(iter(bad))}'"):
            SamplingParams(extra_args=bad)
    del server
    servers.clear()
    gc.collect()
    SamplingParams(extra_args={"ttft_slo_ms": "soon"})
