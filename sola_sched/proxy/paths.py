"""The paths of vLLM's server that clients reach: those of inference, and what only reads.

Everything else is refused: vLLM serves on the same port what puts an engine to sleep, loads
adapters, ends others' requests or runs code in it. A test holds the table in `docs/security.md` and
this list against the routes of vLLM's own server, so that somebody sorts a path that is new.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Set
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from sola_sched.proxy.errors import RefusedError

if TYPE_CHECKING:
    from aiohttp import web  # an engine's server and Serve's controller need the list alone

RESPONSES = "/v1/responses"
#: Requests to these make an engine generate tokens; `/invocations` may be any of them.
GENERATING = (
    "/cohere/v2/chat", "/generative_scoring", "/inference/v1/generate", "/invocations",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions",
    "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", RESPONSES, "/v1/systemone",
)  # fmt: skip
#: Requests to these, also POST, make no engine generate tokens: they classify, embed, rank, count,
#: or turn text into tokens and back.
_OTHERS = (
    "/classify", "/cohere/v2/chat/render", "/detokenize", "/pooling", "/rerank", "/score",
    "/tokenize", "/v1/chat/completions/derender", "/v1/chat/completions/render",
    "/v1/completions/derender", "/v1/completions/render", "/v1/embeddings",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/rerank", "/v1/responses/render",
    "/v1/score", "/v2/embed", "/v2/rerank",
)  # fmt: skip
_GET = ("/v1/models", "/version")
#: What takes a form; all others that take a body take JSON.
_FORMS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))
#: Methods of each path that passes, as vLLM writes the path.
PASSED: dict[str, str] = {
    **dict.fromkeys(GENERATING + _OTHERS, "POST"),
    **dict.fromkeys(_GET, "GET"),
    f"{RESPONSES}/{{response_id}}": "GET",
    f"{RESPONSES}/{{response_id}}/cancel": "POST",
}
_STORED = re.compile(rf"{RESPONSES}/([^/]+)(/cancel)?")
#: Requests that read, or whose only effect is their answer; the others are never sent twice.
_ASKS_ONLY = frozenset(("GET", "HEAD", "OPTIONS"))


@dataclass(frozen=True, slots=True)
class Passage:
    """A request that passes.

    Attributes:
        path: Without a slash at its end.
        response_id: The stored response that it is about.
        is_repeatable: Whether it may be sent again after it has reached a server.
        takes_form: Whether its body may be a form.
    """

    path: str
    response_id: str | None = None
    is_repeatable: bool = True
    takes_form: bool = False


def find(method: str, path: str, more: Set[str] = frozenset()) -> Passage:
    """Whether a request passes.

    Args:
        path: Decoded, without the query. A slash at its end is left out, since vLLM answers that
            with a redirection to its own address.
        more: Further paths, with whatever method.

    Raises:
        RefusedError: It does not.
    """
    path = path.rstrip("/")
    if path in more:
        return Passage(path, None, method in _ASKS_ONLY, takes_form=True)
    response_id = None
    allowed = PASSED.get(path)
    if allowed is None and (stored := _STORED.fullmatch(path)) is not None:
        response_id = stored[1]
        allowed = "POST" if stored[2] else "GET"
    if allowed is None or response_id in (".", ".."):
        raise RefusedError(
            HTTPStatus.NOT_FOUND,
            f"the path must be one of inference, such as /v1/chat/completions (got {path[:200]!r});"
            " control paths are asked for at a server's own address.",
        )
    if method != allowed and method not in _ASKS_ONLY:
        raise RefusedError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"the method must be {allowed} (got {method[:20]!r}).",
            {"Allow": allowed},
        )
    is_repeatable = method in _ASKS_ONLY or not path.endswith("/cancel")
    return Passage(path, response_id, is_repeatable, path in _FORMS)


def target(request: web.Request, passage: Passage) -> str:
    """The path as a server is asked for it, with the query of the request."""
    query = request.rel_url.raw_query_string
    return urllib.parse.quote(passage.path) + (f"?{query}" if query else "")
