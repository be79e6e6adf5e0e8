"""HTTP 503 with `Retry-After` for requests refused because of overload (`overload: reject`).

vLLM turns a finish reason "error" into HTTP 500, after a line in its error log, and a stream has
its status 200 before the engine has said anything. Two of its own ways out are used instead. What
`AsyncLLM.generate` raises as `GenerationError` becomes an error answer with its status code, not
logged. And a `--middleware`, added to the server's arguments, waits for the first byte before it
lets an answer begin: a stream that is refused before that is answered with 503 too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from vllm.logger import init_logger

from sola_sched.config.sola_config import SolaConfig
from sola_sched.front_end import fates_http, hints_http, load_feed, options_http, server_args
from sola_sched.front_end.scheduler_class import is_ours
from sola_sched.reports.refusals import Refusal

_MARK = "_sola_sched_refuses"
_MIDDLEWARE = "sola_sched.front_end.refusals.RefusalMiddleware"

logger = init_logger("vllm.sola_sched")

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]

_MESSAGES = "/v1/messages"
#: Headers that say what the body is.
_OF_BODY = (b"content-type", b"content-length", b"transfer-encoding")
#: Refusals met while one HTTP request is answered; tasks that vLLM starts for it share the list.
_met: ContextVar[list[Refusal] | None] = ContextVar("sola_sched_refusals", default=None)
#: Front ends in this process whose scheduler refuses.
_refusing: WeakSet[Any] = WeakSet()


def register_refusals() -> None:
    """Extend vLLM's server where its scheduler refuses requests, once per process."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if getattr(AsyncLLM.generate, _MARK, False):
        return
    _extend_init(AsyncLLM)
    _extend_generate()
    _extend_from_cli_args()


def _refuses(scheduler_cls: Any, additional_config: Any) -> bool:
    if not is_ours(scheduler_cls):
        return False
    return SolaConfig.from_additional(additional_config).overload == "reject"


def _extend_init(owner: type) -> None:
    original: Any = owner.__init__  # type: ignore[misc]

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.vllm_config
        if _refuses(config.scheduler_config.scheduler_cls, config.additional_config):
            _refusing.add(self)

    owner.__init__ = extended  # type: ignore[misc]


def _extend_generate() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM.generate

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        return _or_raise(outputs) if self in _refusing else outputs

    setattr(extended, _MARK, True)
    AsyncLLM.generate = extended


async def _or_raise(outputs: Any) -> AsyncIterator[Any]:
    """Pass the outputs on, up to one that was refused.

    Raises:
        GenerationError: Of HTTP status 503; the message says when to come back.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for answer in output.outputs:
                if answer.finish_reason == "error":
                    refusal = Refusal.from_stop_reason(answer.stop_reason)
                    if refusal is not None:
                        met = _met.get()
                        if met is not None:
                            met.append(refusal)
                        raise _error(refusal)
            yield output


def _error(refusal: Refusal) -> Exception:
    error: Exception
    try:
        from vllm.exceptions import RetryableRequestError

        error = RetryableRequestError(_text(refusal))
    except ImportError:  # before 0.32
        try:
            from vllm.exceptions import GenerationError
        except ImportError:  # before 0.30
            from vllm.entrypoints.openai.engine.protocol import GenerationError
        error = GenerationError(_text(refusal))
        error.status_code = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined, unused-ignore]
    return error


def _text(refusal: Refusal) -> str:
    return f"{refusal.message}; try again in {refusal.retry_after_s} s"


def _extend_from_cli_args() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.from_cli_args.__func__

    @wraps(original)
    def extended(cls: Any, args: Any) -> Any:
        engine_args = original(cls, args)
        try:
            _add_middleware(args, engine_args)
            if is_ours(engine_args.scheduler_cls):
                load_feed.add_middleware(args, engine_args)
                fates_http.add_middleware(args)
                options_http.add_middleware(args)
                hints_http.add_middleware(args)
        except Exception:  # wrong options are refused where the engine's configuration is made
            logger.debug("sola_sched: no middleware", exc_info=True)
        return engine_args

    EngineArgs.from_cli_args = classmethod(extended)


def _add_middleware(args: Any, engine_args: Any) -> None:
    if _refuses(engine_args.scheduler_cls, engine_args.additional_config):
        server_args.add_middleware(args, _MIDDLEWARE)


class RefusalMiddleware:
    """Lets no answer begin before its first byte, and turns refusals until then into HTTP 503.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send, scope["path"])
        token = _met.set(answer.refusals)
        try:
            await self.app(scope, receive, answer.send)
        finally:
            _met.reset(token)


class _Answer:
    """One HTTP answer, held back until its first byte is known."""

    def __init__(self, send: _Send, path: str) -> None:
        self.refusals: list[Refusal] = []
        self._send, self._path = send, path
        self._start: _Message | None = None
        self._is_replaced = False

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            if self.refusals:
                await self._refuse(start, message)
                return
            await self._send(start)
        if not self._is_replaced:
            await self._send(message)

    async def _refuse(self, start: _Message, body: _Message) -> None:
        refusal = self.refusals[0]
        headers = list(start.get("headers", ()))
        if any(value.startswith(b"text/event-stream") for _, value in headers):
            self._is_replaced = True  # of the stream no more is sent
            text = json.dumps(_error_body(refusal, self._path)).encode()
            headers = [(name, value) for name, value in headers if name.lower() not in _OF_BODY]
            headers.append((b"content-type", b"application/json"))
            headers.append((b"content-length", str(len(text)).encode()))
            body = {"type": "http.response.body", "body": text, "more_body": False}
        elif start["status"] < HTTPStatus.BAD_REQUEST:  # it was answered all the same
            await self._send(start)
            await self._send(body)
            return
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        status = HTTPStatus.SERVICE_UNAVAILABLE.value
        await self._send({**start, "status": status, "headers": headers})
        await self._send(body)


def _error_body(refusal: Refusal, path: str) -> dict[str, Any]:
    """The error in the form of the API that the path belongs to, Anthropic's or OpenAI's."""
    message = _text(refusal)
    if path.rstrip("/").endswith(_MESSAGES):
        return {"type": "error", "error": {"type": "overloaded_error", "message": message}}
    kind, code = "ServiceUnavailableError", HTTPStatus.SERVICE_UNAVAILABLE.value
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
