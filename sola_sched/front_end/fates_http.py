"""What became of requests, on vLLM's own server: `GET /sola/requests` and `/sola/requests/ID`.

`/sola/requests?missed` lists those alone that did not meet their targets, `?limit=10` so many. Each
answer is a JSON object: the list `requests`, each as in `reports.fates.fate_of` and with the rank
of its `engine`; `engines`, on which they ran, as in `reports.fates.engine_facts`, by rank; and
`engine`, the first of these. A server with several API processes answers from what one of them was
told.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from sola_sched.front_end import server_args
from sola_sched.front_end.json_answers import Send, send_json
from sola_sched.reports.fates import FateBook

PATH = "/sola/requests"
MIDDLEWARE = "sola_sched.front_end.fates_http.FatesMiddleware"
#: Of the list, unless `limit` says otherwise.
_USUAL = 100
#: Digits of a limit: what has more is no number of requests.
_MOST_DIGITS = 9

#: Of this process' engines; filled by the loggers, which run in the server's event loop.
BOOK = FateBook()


class FatesMiddleware:
    """Answers these paths.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["method"] != "GET" or not _is_ours(scope["path"]):
            await self.app(scope, receive, send)
            return
        status, body = answer(scope["path"], scope.get("query_string", b"").decode("latin-1"))
        await send_json(send, status, body)


def _is_ours(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def answer(path: str, query: str, book: FateBook = BOOK) -> tuple[HTTPStatus, dict[str, Any]]:
    """Status and body of an answer.

    Args:
        path: One that begins with `PATH`, decoded, as servers give it.
        query: As in the URL.
    """
    req_id = path.removeprefix(PATH).removeprefix("/")
    if req_id:
        found = book.find(req_id)
        if found:
            return HTTPStatus.OK, _told(found, book)
        message = (
            f"'{req_id}' must be the id of a request that has ended, one of the last "
            f"{len(book):,} (none is); it may still be running."
        )
        return HTTPStatus.NOT_FOUND, {"error": {"message": message, "code": 404}}
    options = parse_qs(query, keep_blank_values=True)
    limit = options.get("limit", [str(_USUAL)])[-1]
    is_number = limit.isdecimal() and len(limit) <= _MOST_DIGITS
    if not is_number or set(options) - {"missed", "limit"}:
        message = (
            f"the query may have 'missed' and 'limit', a number of requests (got {query[:100]!r})."
        )
        return HTTPStatus.BAD_REQUEST, {"error": {"message": message, "code": 400}}
    requests = book.latest(int(limit), are_missed="missed" in options)
    return HTTPStatus.OK, _told(requests, book)


def _told(requests: list[dict[str, Any]], book: FateBook) -> dict[str, Any]:
    engines = dict(sorted(book.engines.items()))
    first = next(iter(engines.values()), None)
    named = {str(rank): facts for rank, facts in engines.items()}
    return {"requests": requests, "engine": first, "engines": named}


def add_middleware(args: Any) -> None:
    """Add these paths to a server whose engine has a scheduler of this package.

    Args:
        args: The server's arguments.
    """
    server_args.add_middleware(args, MIDDLEWARE)
