"""What an engine's server counts at its door, and how it drains."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from typing import Any

import pytest

from sola_sched.proxy.paths import GENERATING, PASSED
from sola_sched.serving.arrivals import (
    ARRIVALS,
    ARRIVED,
    ATTEMPT_HEADER,
    MIDDLEWARE,
    Arrivals,
    ArrivalsMiddleware,
)


def _ask(middleware: ArrivalsMiddleware, method: str, path: str, *headers: str) -> None:
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), b"2") for name in headers],
    }
    asyncio.run(middleware(scope, _nothing, _nothing))


async def _nothing(*_: Any) -> Any:
    return None


def test_each_request_for_tokens_counts_once() -> None:
    arrivals = Arrivals()
    seen: list[int] = []

    async def app(*_: Any) -> None:
        seen.append(arrivals.num_in_flight)

    counting = ArrivalsMiddleware(app, arrivals)
    _ask(counting, "POST", "/v1/completions")
    _ask(counting, "POST", "/prefix/v1/chat/completions", "content-type")
    _ask(counting, "POST", "/v1/completions", ATTEMPT_HEADER)  # counted where it was first
    _ask(counting, "POST", "/tokenize")
    _ask(counting, "GET", "/v1/models")

    assert arrivals.stats() == {ARRIVED: 2, "sola_in_flight": 0}
    assert seen == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("path", [path for path, method in PASSED.items() if method == "POST"])
def test_a_server_waits_for_each_request_that_passes_a_gateway(path: str) -> None:
    asked = "/root" + path.replace("{response_id}", "resp_1")

    async def test() -> float:
        arrivals = Arrivals()
        is_over = asyncio.Event()

        async def app(*_: Any) -> None:
            await is_over.wait()

        scope = {"type": "http", "method": "POST", "path": asked, "headers": []}
        asking = asyncio.create_task(ArrivalsMiddleware(app, arrivals)(scope, _nothing, _nothing))
        await asyncio.sleep(0)
        assert arrivals.stats() == {ARRIVED: path in GENERATING, "sola_in_flight": 1}
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, is_over.set)
        begin_s = loop.time()
        await arrivals.drain(30.0)
        await asking
        return loop.time() - begin_s

    assert 0.09 < asyncio.run(test()) < 20.0


def test_each_path_that_passes_is_sorted_by_whether_its_requests_make_tokens() -> None:
    """Who adds one to the list sorts it here too: the scaling law counts those that do."""
    do_not = {path for path, method in PASSED.items() if method == "POST"} - set(GENERATING)

    assert set(GENERATING) <= PASSED.keys()
    assert do_not == {
        "/classify", "/cohere/v2/chat/render", "/detokenize", "/pooling", "/rerank", "/score",
        "/tokenize", "/v1/chat/completions/derender", "/v1/chat/completions/render",
        "/v1/completions/derender", "/v1/completions/render", "/v1/embeddings",
        "/v1/messages/count_tokens", "/v1/messages/render", "/v1/rerank", "/v1/responses/render",
        "/v1/responses/{response_id}/cancel", "/v1/score", "/v2/embed", "/v2/rerank",
    }  # fmt: skip


def test_vllm_finds_the_middleware_by_its_path_and_all_count_in_one_place() -> None:
    module, _, name = MIDDLEWARE.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    before = ARRIVALS.num_arrived

    _ask(found(_nothing), "POST", "/v1/completions")

    assert inspect.isclass(found)
    assert ARRIVALS.num_arrived == before + 1


def test_a_request_that_fails_is_not_in_flight() -> None:
    arrivals = Arrivals()

    async def app(*_: Any) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        _ask(ArrivalsMiddleware(app, arrivals), "POST", "/v1/completions")

    assert arrivals.num_in_flight == 0


def test_a_server_drains_until_it_is_empty_or_its_time_is_over() -> None:
    async def drain(limit_s: float) -> float:
        arrivals = Arrivals()
        arrivals.num_in_flight = 1
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, setattr, arrivals, "num_in_flight", 0)
        begin_s = loop.time()
        await arrivals.drain(limit_s)
        return loop.time() - begin_s

    assert asyncio.run(drain(30.0)) < 20.0
    assert asyncio.run(drain(0.0)) < 0.2


def test_the_gateway_marks_a_second_attempt() -> None:
    pytest.importorskip("aiohttp")
    from fake_replica import FakeReplica
    from gateway_clients import Client, run

    first, second = FakeReplica(cut_after=-1), FakeReplica()

    async def test(client: Client) -> None:
        await client.complete()

        assert ATTEMPT_HEADER not in first.headers[0]
        assert second.headers[0][ATTEMPT_HEADER] == "2"

    run(test, first, second)


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_replica_that_refuses_the_connection_has_counted_nothing(has_arrived: bool) -> None:
    pytest.importorskip("aiohttp")
    from fake_replica import FakeReplica
    from gateway_clients import Client, run, until

    cutting, refusing, last = FakeReplica(cut_after=-1), FakeReplica(), FakeReplica()
    order = [cutting, refusing, last] if has_arrived else [refusing, last]

    async def test(client: Client) -> None:
        async with refusing.running():
            client.gateway.sync({f"new{i}": fake.url for i, fake in enumerate(order)})
            await until(lambda: all(r.has_feed is not None for r in client.gateway.replicas))
        assert (await client.complete()).is_ended  # nobody has told the gateway that one is gone
        assert client.gateway.counts["failed_attempts"] == len(order) - 1

    run(test, cutting, last)
    arrivals = Arrivals()
    for headers in (*cutting.headers, *last.headers):
        _ask(ArrivalsMiddleware(_nothing, arrivals), "POST", "/v1/completions", *headers)

    assert refusing.headers == []
    assert last.headers[0].get(ATTEMPT_HEADER) == ("3" if has_arrived else None)
    assert arrivals.num_arrived == 1
