"""`GET /sola/requests` and `/sola/requests/ID`, on vLLM's own server."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fates import ended, record_of

from sola_sched.core.fates import Ended
from sola_sched.front_end import fates_http
from sola_sched.front_end.fates_http import FatesMiddleware, add_middleware, answer
from sola_sched.reports.fates import FateBook, to_report

pytestmark = pytest.mark.vllm


@pytest.fixture
def book() -> FateBook:
    book = FateBook()
    book.add(to_report(ended(record_of(), record_of(end="missed"), record_of(end="rejected"))))
    book.engines[0] = {"gamma": {}}
    return book


@pytest.mark.parametrize(
    ("path", "query", "names"),
    [
        ("/sola/requests", "", ["r2", "r1", "r0"]),
        ("/sola/requests", "missed", ["r2", "r1"]),
        ("/sola/requests", "missed=&limit=1", ["r2"]),
        ("/sola/requests", "limit=0", []),
        ("/sola/requests/r1", "limit=5", ["r1"]),
        ("/sola/requests/r", "", ["r0", "r1", "r2"]),
    ],
)
def test_which_requests_are_told(book: FateBook, path: str, query: str, names: list[str]) -> None:
    status, body = answer(path, query, book)
    assert status == HTTPStatus.OK
    assert [fate["request_id"] for fate in body["requests"]] == names
    assert body["engine"] == {"gamma": {}}


def test_an_id_is_decoded_once_by_the_server() -> None:
    book = FateBook()
    record = ended(record_of()).records
    for name in ("50%31", "501"):
        book.add(to_report(Ended([name], ["default"], record)))
    _, body = answer("/sola/requests/50%31", "", book)
    assert [fate["request_id"] for fate in body["requests"]] == ["50%31"]


@pytest.mark.parametrize(
    ("path", "query", "status", "said"),
    [
        ("/sola/requests/x", "", 404, "'x' must be the id of a request that has ended"),
        ("/sola/requests", "limit=-1", 400, "'limit', a number of requests"),
        ("/sola/requests", "limit=many", 400, "'limit', a number of requests"),
        ("/sola/requests", "limit=" + "9" * 5000, 400, "'limit', a number of requests"),
        ("/sola/requests", "mised", 400, "the query may have 'missed'"),
    ],
)
def test_what_cannot_be_told(book: FateBook, path: str, query: str, status: int, said: str) -> None:
    found, body = answer(path, query, book)
    assert found == status
    assert said in body["error"]["message"]


async def _asked(path: str, method: str = "GET") -> tuple[list[dict[str, Any]], list[str]]:
    sent: list[dict[str, Any]] = []
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "query_string": b"limit=1"}
    await FatesMiddleware(app)(scope, None, send)
    return sent, passed


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/models", "GET"), ("/sola/requests", "POST"), ("/sola/requestsx", "GET")],
)
def test_other_paths_go_on(path: str, method: str) -> None:
    assert asyncio.run(_asked(path, method)) == ([], [path])


def test_an_answer_over_http(book: FateBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fates_http, "answer", lambda path, query: answer(path, query, book))
    (start, body), passed = asyncio.run(_asked("/sola/requests"))
    assert passed == []
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert [fate["request_id"] for fate in json.loads(body["body"])["requests"]] == ["r2"]


def test_servers_get_the_page_once() -> None:
    args = SimpleNamespace(middleware=["other"])
    add_middleware(args)
    add_middleware(args)
    assert args.middleware == ["other", fates_http.MIDDLEWARE]
    add_middleware(SimpleNamespace())  # the arguments of no server
