"""`GET /sola/load`, on vLLM's own server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from sola_sched.front_end import load_feed
from sola_sched.front_end.load_feed import LoadFeed, LoadFeedMiddleware

pytestmark = pytest.mark.vllm


async def _read(feed: LoadFeed, count: int) -> list[bytes]:
    lines = []
    async for line in feed.lines():
        lines.append(line)
        if len(lines) == count:
            break
    return lines


def test_a_feed_begins_with_the_last_report_and_its_age_and_pushes_each_new_one() -> None:
    async def whole() -> None:
        feed = LoadFeed()
        feed.publish("first")
        await asyncio.sleep(0.05)
        reading = asyncio.create_task(_read(feed, 3))
        await asyncio.sleep(0.02)
        feed.publish("second")
        await asyncio.sleep(0.02)
        feed.publish(None)

        first, second, third = await asyncio.wait_for(reading, 0.5)
        assert first.endswith(b" first\n")
        assert float(first.split()[0]) >= 0.045
        assert second.endswith(b" second\n")
        assert third == b"!\n"

    asyncio.run(whole())


def test_a_feed_gives_signs_of_life_and_skips_what_a_slow_reader_has_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_feed, "_SIGN_OF_LIFE_S", 0.02)

    async def whole() -> None:
        feed = LoadFeed()
        lines = feed.lines()
        assert await anext(lines) == b"\n"
        feed.publish("missed")
        feed.publish("last")
        assert (await anext(lines)).endswith(b" last\n")
        assert await asyncio.wait_for(anext(lines), 0.5) == b"\n"

    asyncio.run(whole())


def test_the_server_answers_the_feeds_path_and_leaves_the_others_alone() -> None:
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def whole() -> None:
        middleware, sent = LoadFeedMiddleware(app), []
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 2:
                gone.set()

        scope = {"type": "http", "path": "/sola/load", "method": "GET"}
        await asyncio.wait_for(middleware(scope, receive, send), 2.0)
        assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
        await middleware({"type": "http", "path": "/v1/models", "method": "GET"}, receive, send)
        await middleware({"type": "lifespan", "path": "-"}, receive, send)

    asyncio.run(whole())
    assert passed == ["/v1/models", "-"]


def test_a_server_with_a_reader_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_feed, "FEED", LoadFeed())  # of the loop below
    try:
        from vllm.entrypoints.launchers.launcher import serve_http
    except ImportError:
        from vllm.entrypoints.launcher import serve_http
    from fastapi import FastAPI

    app = FastAPI()
    app.add_middleware(LoadFeedMiddleware)
    app.state.engine_client = SimpleNamespace(
        vllm_config=SimpleNamespace(shutdown_timeout=0),
        shutdown=lambda timeout: None,
        errored=False,
        is_running=True,
    )

    async def serve(listener: socket.socket, port: int) -> None:
        await (await serve_http(app, listener, host="127.0.0.1", port=port, log_level="error"))

    async def whole() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(serve(listener, port))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /sola/load HTTP/1.1\r\nHost: x\r\n\r\n")
            begin = await asyncio.wait_for(reader.readuntil(b"\n\r\n"), 10.0)
            reading = asyncio.create_task(reader.read())
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(serving), 5.0)
            finally:
                writer.close()
                rest = await asyncio.wait_for(reading, 5.0)
            return begin + rest

    told = asyncio.run(whole())
    assert told.startswith(b"HTTP/1.1 200")
    assert told.endswith(b"0\r\n\r\n"), "the answer is whole"


class _Core:
    """The client of an engine, as far as its end is concerned."""

    _finalizer: Any = None


@pytest.mark.parametrize("ended", ["server", "engine", "client"])
def test_the_answer_ends_with_the_server_and_with_its_engine(
    ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_feed, "FEED", LoadFeed())
    monkeypatch.setattr(load_feed, "_SIGN_OF_LIFE_S", 0.02)
    core = _Core()
    core._finalizer = weakref.finalize(core, str)
    state = SimpleNamespace(
        server=SimpleNamespace(should_exit=False),
        engine_client=SimpleNamespace(errored=False, engine_core=core),
    )

    async def whole() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/sola/load", "method": "GET"}
        answering = asyncio.create_task(
            LoadFeedMiddleware(None)(
                {**scope, "app": SimpleNamespace(state=state)}, asyncio.Event().wait, send
            )
        )
        await asyncio.sleep(0.1)
        assert not answering.done()
        if ended == "server":
            state.server.should_exit = True
        elif ended == "client":  # first thing of vLLM's shutdown, before it waits for requests
            core._finalizer.detach()
        else:
            state.engine_client.errored = True
        await asyncio.wait_for(answering, 1.0)
        return sent

    *_, before, last = asyncio.run(whole())
    assert before["more_body"]
    assert not last["more_body"]


@pytest.mark.parametrize(("interval_s", "is_there"), [(0.25, True), (None, False)])
def test_a_server_has_the_feed_when_its_engine_reports(
    interval_s: float | None, is_there: bool
) -> None:
    args = SimpleNamespace(middleware=["other"])
    sola = {"load_interval_s": interval_s}
    load_feed.add_middleware(args, SimpleNamespace(additional_config={"sola_sched": sola}))

    assert (load_feed.MIDDLEWARE in args.middleware) == is_there
    assert args.middleware[0] == "other"


@pytest.mark.parametrize(
    ("given", "engine", "said"),
    [
        ({}, {"disable_log_stats": True}, "--disable-log-stats"),
        ({}, {"data_parallel_size": 2}, "several engines"),
        ({"api_server_count": 2}, {}, "several API processes"),
        ({"api_server_count": None}, {"data_parallel_size": 1, "disable_log_stats": False}, None),
    ],
)
def test_a_server_whose_feed_would_be_empty_has_none_and_says_so(
    given: dict[str, Any],
    engine: dict[str, Any],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(load_feed.logger, "warning", lambda text, *a: told.append(text % a))
    args = SimpleNamespace(middleware=[], **given)
    additional = {"sola_sched": {"load_interval_s": 0.25}}
    load_feed.add_middleware(args, SimpleNamespace(additional_config=additional, **engine))

    assert args.middleware == ([load_feed.MIDDLEWARE] if said is None else [])
    assert len(told) == (said is not None)
    assert said is None or said in told[0]
