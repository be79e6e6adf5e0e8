"""The router in Serve's own proxy, without a cluster: what it books, and replicas that die."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve.request_router")

from ray.serve.request_router import RequestRouter

from sola_sched.serving.ray_router import SolaRequestRouter

A, B = (
    SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name), replica_metadata={"url": f"http://{name}:9"}
    )
    for name in "ab"
)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", lambda *args: None)
    router = object.__new__(SolaRequestRouter)
    router.select_available_replicas = lambda candidates: candidates
    router.initialize_state("memory")
    router._mine.sync({"a": "http://a:9", "b": "http://b:9"})
    return router


def _pending(number: int) -> Any:
    return SimpleNamespace(
        args=[{"prompt": "hello " * 50, "max_tokens": 50}],
        future=Future(),
        metadata=SimpleNamespace(
            request_id=f"http-{number}", internal_request_id=f"internal-{number}"
        ),
    )


def _choose(router: Any, pending: Any) -> Any:
    return asyncio.run(router.choose_replicas([A, B], pending))[0][0].replica_id


@pytest.mark.parametrize("is_followed", [True, False])
def test_requests_that_have_ended_weigh_on_no_replica(router: Any, is_followed: bool) -> None:
    for number in range(20):
        pending = _pending(number)
        chosen = _choose(router, pending)
        other = B.replica_id if chosen.unique_id == "a" else A.replica_id
        taken = chosen if is_followed else other
        router.on_request_routed(pending, taken, None)
        router.on_request_completed(taken, pending.metadata.internal_request_id)

    _choose(router, _pending(99))
    _choose(router, _pending(99))  # Serve asks again where nobody has taken it
    loads = router._mine._router._loads
    assert sum(load for load in loads.values() if load) <= 1.0


def test_a_request_that_serve_gives_up_weighs_on_no_replica(router: Any) -> None:
    for number in range(20):
        pending = _pending(number)
        _choose(router, pending)
        _choose(router, pending)  # nobody has taken it, and its client leaves

        pending.future.cancel()

    assert not any(router._mine._router._loads.values())
    assert not router._chosen


def test_the_death_of_a_replica_with_requests_is_taken_in(router: Any) -> None:
    pending = _pending(0)
    router.on_request_routed(pending, A.replica_id, None)

    router.on_replica_actor_died(A.replica_id)
    router.on_request_completed(A.replica_id, pending.metadata.internal_request_id)

    assert {_choose(router, _pending(n)).unique_id for n in range(1, 4)} == {"b"}
