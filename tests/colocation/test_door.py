"""The door before two services, played by small HTTP servers."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientPayloadError, ClientSession, FormData, TCPConnector, web
from aiohttp.test_utils import TestServer
from yarl import URL

from sola_sched.colocation.door import Door
from sola_sched.colocation.sleeping import SleepOptions
from sola_sched.proxy.listener import Listener, listening


class FakeVllm:
    """What the door needs of a vLLM server. A request while it sleeps, or sleep while it serves,
    is counted as a mistake.

    Args:
        has_sleep_mode: As with `--enable-sleep-mode`.
        num_lost: Times that it sleeps and its reply is lost.
        cuts_at: How many pieces an answer has when its connection breaks; -1 for no headers.
        is_reset: It breaks with a reset.
    """

    def __init__(
        self,
        has_sleep_mode: bool = True,
        num_lost: int = 0,
        cuts_at: int | None = None,
        is_reset: bool = False,
    ) -> None:
        self.is_asleep, self.num_serving, self.num_mistakes = True, 0, 0
        self.log: list[str] = []
        self._has_sleep_mode, self._num_lost = has_sleep_mode, num_lost
        self._cuts_at, self._is_reset = cuts_at, is_reset

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/is_sleeping", self._tell)
        if self._has_sleep_mode:
            app.router.add_post("/sleep", self._sleep)
            app.router.add_post("/wake_up", self._wake_up)
        return app

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.is_asleep})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.num_mistakes += self.num_serving
        self.log.append(request.query_string)
        await asyncio.sleep(0.01)
        self.is_asleep = True
        if self._num_lost:
            self._num_lost -= 1
            self._break(request)
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.log.append("wake up")
        await asyncio.sleep(0.01)
        self.is_asleep = False
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.num_mistakes += self.is_asleep
        if self._cuts_at == -1:
            self._break(request)
            return web.Response()
        self.num_serving += 1
        body = await request.json()
        response = web.StreamResponse(headers={"X-Served-By": body["model"]})
        await response.prepare(request)
        for number in range(body.get("n", 3)):
            if number == self._cuts_at:
                self._break(request)
                break
            await asyncio.sleep(0.005)
            await response.write(f"data: {number}\n\n".encode())
            self.num_mistakes += self.is_asleep
        self.num_serving -= 1
        await response.write_eof()
        return response

    def _break(self, request: web.Request) -> None:
        assert request.transport is not None
        if self._is_reset:
            connection = request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()


@asynccontextmanager
async def door_before(
    servers: Mapping[str, FakeVllm | Answers], **options: Any
) -> AsyncIterator[tuple[ClientSession, str, str]]:
    async with AsyncExitStack() as stack:
        urls = {}
        for name, server in servers.items():
            running = await stack.enter_async_context(TestServer(server.app()))
            urls[name] = f"http://127.0.0.1:{running.port}"
        door = Door(urls, SleepOptions(**options))
        here = ("127.0.0.1", 0)
        url, admin_url = await stack.enter_async_context(
            listening((Listener(door.app(), door.front), here), (Listener(door.admin_app()), here))
        )
        client = await stack.enter_async_context(ClientSession())
        yield client, url, admin_url


async def complete(client: ClientSession, url: str, model: str, n: int = 3) -> tuple[int, str]:
    async with client.post(f"{url}/v1/completions", json={"model": model, "n": n}) as answer:
        return answer.status, await answer.text()


def play(scene: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


def test_requests_for_two_services_of_which_one_fits_are_all_answered() -> None:
    servers = {"a": FakeVllm(), "b": FakeVllm()}

    async def scene() -> None:
        async with door_before(servers, max_awake=1, least_s=0.02, idle_s=100.0) as (
            client,
            url,
            _,
        ):
            asked = [complete(client, url, "ab"[n % 2], n) for n in range(30)]
            answers = await asyncio.gather(*asked)

        for n, (status, text) in enumerate(answers):
            assert (status, text) == (200, "".join(f"data: {i}\n\n" for i in range(n)))

    play(scene)
    for server in servers.values():
        assert server.num_mistakes == 0
        assert "wake up" in server.log
    assert "level=1&mode=wait" in servers["a"].log + servers["b"].log


def sleep_and_wake(server: FakeVllm) -> None:
    """Leave it idle until it sleeps, then ask again."""

    async def scene() -> None:
        async with door_before({"a": server}, idle_s=0.05) as (client, url, _):
            await complete(client, url, "a")
            while not server.is_asleep:
                await asyncio.sleep(0.01)
            assert (await complete(client, url, "a"))[0] == 200

    play(scene)
    assert server.num_mistakes == 0


def test_an_idle_service_is_put_to_sleep() -> None:
    sleep_and_wake(FakeVllm())


def test_a_service_whose_reply_to_sleep_is_lost_is_woken_for_the_next_request() -> None:
    server = FakeVllm(num_lost=1)
    sleep_and_wake(server)
    assert server.log[:3] == ["wake up", "level=1&mode=wait", "wake up"]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_server_that_breaks_the_connection_before_its_answer_gives_502(is_reset: bool) -> None:
    async def scene() -> None:
        servers = {"a": FakeVllm(cuts_at=-1, is_reset=is_reset)}
        async with door_before(servers) as (client, url, admin):
            status, text = await complete(client, url, "a")
            async with client.get(f"{admin}/services") as answer:
                services = await answer.json()

        assert status == 502
        error = json.loads(text)["error"]
        message = "the server of 'a' cannot be reached: the connection broke off"
        assert (error["message"], error["code"]) == (message, 502)
        assert services["a"]["num_in_flight"] == 0

    play(scene)


@pytest.mark.parametrize(
    ("error", "status"), [(TimeoutError(), 504), (OSError("no more descriptors"), 502)]
)
def test_a_connection_that_cannot_be_made_gives_502_or_504(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    async def scene() -> None:
        async with door_before({"a": FakeVllm()}) as (client, url, _):
            connect = TCPConnector.connect

            async def fail(connector: TCPConnector, request: Any, *args: Any, **named: Any) -> Any:
                if request.url.path == "/v1/completions" and request.url.port != URL(url).port:
                    raise error
                return await connect(connector, request, *args, **named)

            monkeypatch.setattr(TCPConnector, "connect", fail)
            found, text = await complete(client, url, "a")

        assert found == status
        message = json.loads(text)["error"]["message"]
        assert message.startswith("the server of 'a' cannot be reached: ")
        assert not message.endswith(": ")

    play(scene)


def test_an_answer_that_breaks_off_is_cut_for_the_client_too() -> None:
    async def scene() -> None:
        async with door_before({"a": FakeVllm(cuts_at=1)}) as (client, url, _):
            with pytest.raises(ClientPayloadError):
                await complete(client, url, "a")

    play(scene)


def test_a_server_without_sleep_mode_is_named_with_what_to_do() -> None:
    async def scene() -> None:
        async with door_before({"a": FakeVllm(has_sleep_mode=False)}) as (client, url, _):
            status, text = await complete(client, url, "a")

        assert status == 503
        message = json.loads(text)["error"]["message"]
        assert "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode" in message
        assert "127.0.0.1" not in message

    play(scene)


def test_an_unknown_model_is_refused_and_the_known_are_listed() -> None:
    async def scene() -> None:
        async with door_before({"a": FakeVllm(), "b": FakeVllm()}) as (client, url, admin):
            status, text = await complete(client, url, "c")
            async with client.get(f"{url}/v1/models") as answer:
                models = [each["id"] for each in (await answer.json())["data"]]
            async with client.get(f"{admin}/services") as answer:
                services = await answer.json()

        assert status == 404
        assert "'model' must be one of 'a', 'b' (got 'c')" in json.loads(text)["error"]["message"]
        assert models == ["a", "b"]
        assert services["a"] == {"is_awake": False, "num_in_flight": 0, "num_waiting": 0}

    play(scene)


@pytest.mark.parametrize(
    "path", ["/sleep", "/collective_rpc", "/v1/../sleep", "/v1/%2e%2e/sleep", "//sleep"]
)
def test_paths_that_are_not_for_clients_do_not_reach_a_server(path: str) -> None:
    async def scene() -> None:
        async with door_before({"a": FakeVllm()}) as (client, url, _):
            target = URL(url + path, encoded=True)
            async with client.post(target, json={"model": "a"}) as answer:
                status, text = answer.status, await answer.text()
            async with client.post(f"{url}/v1/completions", json={"model": ["a"]}) as answer:
                of_a_list = answer.status

        assert status == 404
        assert "the path must be one of inference" in text
        assert of_a_list == 404

    play(scene)


class Answers:
    """A server that is awake, and answers every other request so."""

    def __init__(self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._handler = handler

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/is_sleeping":
            return web.json_response({"is_sleeping": False})
        return await self._handler(request)


def named(name: str) -> Answers:
    """A server that says its name, and what it was asked."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/responses":
            return web.json_response({"id": f"resp_{name}"})
        return web.json_response(
            {"at": name, "path": request.path_qs, "length": len(body)},
            headers={"X-Coding": request.headers.get("Content-Encoding", "none")},
        )

    return Answers(answer)


def test_forms_and_requests_without_a_body_find_their_service() -> None:
    async def scene() -> None:
        async with door_before({"a": named("a"), "b": named("b")}) as (client, url, _):

            async def at(method: str, path: str, **more: Any) -> Any:
                async with client.request(method, url + path, **more) as answer:
                    return await answer.json() if answer.status == 200 else answer.status

            form = FormData({"model": "b"})
            form.add_field("file", b"RIFF" * 1000, filename="x.wav")
            spoken = await at("POST", "/v1/audio/transcriptions", data=form)
            assert (spoken["at"], spoken["length"] > 4000) == ("b", True)
            assert (await at("POST", "/v1/embeddings/", json={"model": "b"}))["at"] == "b"
            assert (await at("POST", "/tokenize?x=%20", json={"model": "b"}))["path"] == (
                "/tokenize?x=%20"
            )
            assert (await at("OPTIONS", "/v1/completions"))["at"] == "a"
            assert (await at("GET", "/version"))["at"] == "a"
            assert (await at("GET", "/v1/models"))["data"][1]["id"] == "b"
            other = FormData({"x": "b"}, default_to_multipart=True)
            assert await at("POST", "/v1/audio/transcriptions", data=other) == 404
            assert await at("POST", "/v1/completions", data=b"{") == 400
            assert await at("POST", "/v1/completions") == 400

            assert (await at("POST", "/v1/responses", json={"model": "b"}))["id"] == "resp_b"
            assert (await at("GET", "/v1/responses/resp_b"))["at"] == "b"
            assert (await at("POST", "/v1/responses/resp_b/cancel"))["at"] == "b"
            assert await at("GET", "/v1/responses/resp_c") == 404

    play(scene)


def test_one_service_has_every_stored_response() -> None:
    async def scene() -> None:
        async with (
            door_before({"a": named("a")}) as (client, url, _),
            client.get(f"{url}/v1/responses/resp_x") as answer,
        ):
            assert (await answer.json())["at"] == "a"

    play(scene)


def test_compressed_bodies_go_on_plain_and_corrupt_ones_are_refused() -> None:
    async def scene() -> None:
        body = b'{"model": "a"}'
        async with door_before({"a": named("a")}) as (client, url, _):
            for data, status in ((gzip.compress(body), 200), (gzip.compress(body)[:-4], 400)):
                coded = {"Content-Encoding": "gzip"}
                path = f"{url}/v1/completions"
                async with client.post(path, data=data, headers=coded) as answer:
                    assert answer.status == status
                    if status == 200:
                        assert (await answer.json())["length"] == len(body)
                        assert answer.headers["X-Coding"] == "none"

    play(scene)


def test_answers_come_back_in_the_coding_and_with_the_headers_that_they_have() -> None:
    headers = [("Content-Encoding", "zstd"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"),
               ("Connection", "keep-alive, X-Hop"), ("X-Hop", "x")]  # fmt: skip
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers)
        return web.Response(body=b"(\xb5/\xfd", headers=headers)

    async def scene() -> None:
        async with (
            door_before({"a": Answers(answer)}) as (_, url, _),
            ClientSession(auto_decompress=False) as client,
        ):
            sent = {"Accept-Encoding": "zstd", "X-Forwarded-For": "9.9.9.9"}
            path = f"{url}/v1/completions"
            async with client.post(path, json={"model": "a"}, headers=sent) as reply:
                assert await reply.read() == b"(\xb5/\xfd"
                assert reply.headers["Content-Encoding"] == "zstd"
                assert reply.headers.getall("Set-Cookie") == ["a=1", "b=2"]
                assert "X-Hop" not in reply.headers
        assert asked[0]["Accept-Encoding"] == "zstd"
        assert asked[0]["X-Forwarded-For"] == "9.9.9.9, 127.0.0.1"

    play(scene)


def test_a_connection_that_closes_as_it_is_used_is_opened_anew_at_once() -> None:
    served: set[Any] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.transport in served:  # as it would be after it has been idle for too long
            assert request.transport is not None
            request.transport.abort()
        served.add(request.transport)
        return web.json_response({})

    async def scene() -> None:
        async with door_before({"a": Answers(answer)}) as (client, url, _):
            for _ in range(10):
                assert (await complete(client, url, "a"))[0] == 200
        assert len(served) > 5

    play(scene)
