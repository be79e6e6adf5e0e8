"""The router in Serve's own proxy, without a cluster: what it books, and replicas that die."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import tracemalloc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve.request_router")

import aiohttp
from cluster_views import make_view
from ray.serve.request_router import RequestRouter

from sola_sched.serving import membership, ray_router
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


def _ends_with_an_error(router: Any, pending: Any) -> None:
    pending.future.set_exception(RuntimeError("no replica"))


def _fails_as_it_is_sent(router: Any, pending: Any) -> None:
    pending.future.set_result(A)
    router.on_request_completed(A.replica_id, pending.metadata.internal_request_id)


def _is_cancelled_in_its_second_try(router: Any, pending: Any) -> None:
    pending.future.set_result(A)
    pending.future = Future()  # as Serve does where the replica has refused it
    _choose(router, pending)
    pending.future.cancel()


@pytest.mark.parametrize(
    "fails", [_ends_with_an_error, _fails_as_it_is_sent, _is_cancelled_in_its_second_try]
)
def test_a_request_that_fails_before_it_is_accepted_weighs_on_no_replica(
    router: Any, fails: Any
) -> None:
    for number in range(20):
        pending = _pending(number)
        _choose(router, pending)
        fails(router, pending)

    assert not any(router._mine._router._loads.values())
    assert not router._chosen


def test_a_refusal_that_is_told_late_ends_neither_the_next_try_nor_the_next_attempt(
    router: Any,
) -> None:
    pending, (a, b) = _pending(0), (A.replica_id, B.replica_id)
    name = pending.metadata.internal_request_id
    _choose(router, pending)
    pending.future.set_result(A)
    pending.future = Future()
    _choose(router, pending)

    router.on_request_completed(a, name)
    assert name in router._chosen
    router.on_request_routed(pending, b, None)
    router.on_request_completed(a, name)

    assert [view.num_requests for view in router._mine.reports.views] == [0, 1]
    router.on_request_completed(b, name)
    assert [view.num_requests for view in router._mine.reports.views] == [0, 0]


def test_a_request_that_is_routed_twice_is_booked_once(router: Any) -> None:
    pending = _pending(0)
    for replica_id in (A.replica_id, A.replica_id, B.replica_id):
        router.on_request_routed(pending, replica_id, None)
    assert [len(replica.attempts) for replica in router._mine] == [1, 1]

    for replica_id in (A.replica_id, B.replica_id):
        router.on_request_completed(replica_id, pending.metadata.internal_request_id)

    assert [view.num_requests for view in router._mine.reports.views] == [0, 0]
    assert not any(replica.attempts for replica in router._mine)


def test_the_death_of_a_replica_with_requests_is_taken_in(router: Any) -> None:
    pending = _pending(0)
    router.on_request_routed(pending, A.replica_id, None)

    router.on_replica_actor_died(A.replica_id)
    router.on_request_completed(A.replica_id, pending.metadata.internal_request_id)

    assert {_choose(router, _pending(n)).unique_id for n in range(1, 4)} == {"b"}


def _pending_http(*headers: tuple[str, str]) -> Any:
    """A request as Serve's own proxy shows it, which has not read its body."""
    scope = {"headers": [(name.encode(), value.encode("latin-1")) for name, value in headers]}
    pending = _pending(0)
    pending.args = [SimpleNamespace(asgi_scope=scope)]
    return pending


@pytest.mark.parametrize(
    "size",
    ["2000000000", "9" * 18, "9" * 5000, "abc", "-5", "+5", "1_000", " 7", "", "\xb2", "1.5"],
)
def test_a_size_that_a_client_announces_costs_nothing_and_is_forgotten(
    router: Any, size: str
) -> None:
    pending = _pending_http(("content-length", size))
    tracemalloc.start()

    chosen = _choose(router, pending)
    router.on_request_routed(pending, chosen, None)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 2**20
    assert router.num_failures == 0
    (view,) = [view for view in router._mine.reports.views if view.num_requests]
    assert 1 <= view.waiting_tokens[0] <= 2**17
    router.on_request_completed(chosen, "internal-0")
    assert not any(router._mine._router._loads.values())


def test_an_announced_size_counts_for_no_more_than_the_longest_prompt_there_is_room_for(
    router: Any,
) -> None:
    for replica in router._mine:
        router._mine.reported(replica, make_view(max_model_len=500, reported_s=0.0))

    request = router._routed(_pending_http(("content-length", "1000000")), "r")

    assert request.prompt_tokens == 499


@pytest.mark.parametrize("arguments", [[], [b"not a pickle"], [pickle.dumps(3)], [{"prompt": 3}]])
def test_what_is_shown_in_no_form_that_is_known_is_routed_by_serve(
    router: Any, arguments: list[Any]
) -> None:
    pending = _pending(0)
    pending.args = arguments

    assert _choose(router, pending).unique_id in "ab"
    router.on_request_routed(pending, A.replica_id, None)
    router.on_request_completed(A.replica_id, "internal-0")


def test_an_error_of_ours_leaves_no_request_without_an_answer_and_is_told_once(
    router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    router._mine.choose = fail
    for number in range(3):
        assert _choose(router, _pending(number)) is A.replica_id

    assert router.num_failures == 3
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


def test_connections_to_replicas_that_have_left_are_closed(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *args: None)
    near = [
        SimpleNamespace(
            replica_id=SimpleNamespace(unique_id=f"near{number}"),
            replica_metadata={"url": f"http://10.0.0.{number}:9"},
            node_id="here",
        )
        for number in range(2)
    ]

    async def come_and_go() -> list[int]:
        numbers = []
        for replicas in (near, near[:1], []):
            router.update_replicas(replicas)
            await asyncio.sleep(0.05)
            numbers.append(_num_open_sessions())
        return numbers

    assert asyncio.run(come_and_go()) == [2, 1, 0]


def _num_open_sessions() -> int:
    sessions = [each for each in gc.get_objects() if isinstance(each, aiohttp.ClientSession)]
    return sum(not session.closed for session in sessions)


def test_an_engine_that_only_its_own_node_can_reach_is_told_to_no_gateway_elsewhere(
    router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def there(name: str, node: str, host: str) -> Any:
        return SimpleNamespace(
            replica_id=SimpleNamespace(unique_id=name),
            replica_metadata={"url": f"http://{host}:9"},
            node_id=node,
        )

    told: list[dict[str, str]] = []
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray_router.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *args: None)
    monkeypatch.setattr(membership, "listeners", [lambda _, urls: told.append(urls)])
    router._deployment_id = SimpleNamespace(app_name="a", name="d")
    replicas = [
        there("near", "here", "127.0.0.1"),
        there("far", "there", "127.0.0.1"),
        there("open", "there", "10.0.0.7"),
    ]

    router.update_replicas(replicas)
    router.update_replicas(replicas)

    assert [set(urls) for urls in told] == [{"near", "open"}] * 2
    (line,) = [record.message for record in caplog.records]
    assert "far" in line
    assert "'engine_host'" in line
