"""How a server answers refused requests: what is sent, and in which servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tiny_llama import write_tiny_llama
from vllm.engine.arg_utils import AsyncEngineArgs

from sola_sched.front_end import fates_http, options_http, refusals
from sola_sched.front_end.refusals import _MIDDLEWARE, RefusalMiddleware, _or_raise
from sola_sched.reports.refusals import Refusal
from sola_sched.vllm_adapter.plugin import register

try:
    from vllm.exceptions import GenerationError
except ImportError:  # before 0.30
    from vllm.entrypoints.openai.engine.protocol import GenerationError

pytestmark = pytest.mark.vllm

REFUSAL = Refusal(7, "too late")
STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
CORS = (b"access-control-allow-origin", b"*")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


async def outputs(*stop_reasons: str | None) -> Any:
    for stop_reason in stop_reasons:
        reason = "error" if stop_reason else None
        answer = SimpleNamespace(finish_reason=reason, stop_reason=stop_reason)
        yield SimpleNamespace(outputs=[answer])


def answer(
    *chunks: bytes,
    status: int = 200,
    headers: Any = (),
    stop_reasons: Any = (None,),
    path: str = "/v1/completions",
) -> list[dict[str, Any]]:
    """What the middleware sends of an answer whose engine outputs end as said."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def produce() -> None:  # as vLLM does: the status may go before the first output
            with suppress(GenerationError):
                async for _ in _or_raise(outputs(*stop_reasons)):
                    pass

        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        assert sent == []
        await asyncio.create_task(produce())
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(RefusalMiddleware(app)({"type": "http", "path": path}, None, send))
    return sent


def test_an_answer_that_is_not_refused_passes_unchanged() -> None:
    sent = answer(b"one", b"two", headers=[STREAM])

    assert (sent[0]["status"], sent[0]["headers"]) == (200, [STREAM])
    assert [message["body"] for message in sent[1:]] == [b"one", b"two", b""]


def test_a_refused_stream_is_one_answer_with_status_503() -> None:
    sent = answer(
        b"data: {}\n\n",
        b"data: [DONE]\n\n",
        headers=[STREAM, CORS],
        stop_reasons=[REFUSAL.to_stop_reason()],
    )

    start, body = sent
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"retry-after"] == b"7"
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"access-control-allow-origin"] == b"*"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["error"]["message"] == "too late; try again in 7 s"
    assert not body["more_body"]


def test_a_refused_stream_of_anthropics_api_is_answered_in_its_form() -> None:
    _, body = answer(
        b"event: message_start\ndata: {}\n\n",
        headers=[STREAM],
        stop_reasons=[REFUSAL.to_stop_reason()],
        path="/v1/messages",
    )

    message = "too late; try again in 7 s"
    assert json.loads(body["body"]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": message},
    }


def test_an_error_answer_keeps_its_body_and_gets_the_header() -> None:
    sent = answer(b"{}", status=500, headers=[CORS], stop_reasons=[REFUSAL.to_stop_reason()])

    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (503, b"7")
    assert [message["body"] for message in sent[1:]] == [b"{}", b""]


def test_an_answer_given_in_spite_of_a_refusal_stays() -> None:
    sent = answer(b"{}", headers=[CORS], stop_reasons=[REFUSAL.to_stop_reason()])

    assert (sent[0]["status"], sent[0]["headers"]) == (200, [CORS])


def test_other_errors_of_the_engine_pass_as_outputs() -> None:
    async def collect() -> list[Any]:
        return [output async for output in _or_raise(outputs("a failed copy"))]

    assert [o.outputs[0].stop_reason for o in asyncio.run(collect())] == ["a failed copy"]


def test_a_refusal_is_raised_as_an_error_of_vllms_with_status_503() -> None:
    async def collect() -> None:
        async for _ in _or_raise(outputs(None, REFUSAL.to_stop_reason())):
            pass

    with pytest.raises(GenerationError, match="too late; try again in 7 s") as raised:
        asyncio.run(collect())
    assert raised.value.status_code == 503


def test_refusals_of_one_request_do_not_show_in_the_next() -> None:
    answer(b"{}", stop_reasons=[REFUSAL.to_stop_reason()])

    assert answer(b"{}", status=404)[0]["status"] == 404


@pytest.mark.parametrize(
    ("scheduler_cls", "options", "is_added"),
    [
        ("sola_sched.Scheduler", {"overload": "reject"}, True),
        ("sola_sched.Scheduler", {}, False),
        ("sola_sched.Scheduler", {"overload": "nonsense"}, False),
        ("vllm.v1.core.sched.scheduler.Scheduler", {"overload": "reject"}, False),
        (None, {"overload": "reject"}, False),
    ],
)
def test_the_middleware_is_added_to_servers_whose_scheduler_refuses(
    model_dir: Path, scheduler_cls: str | None, options: dict[str, Any], is_added: bool
) -> None:
    register()
    args = SimpleNamespace(
        model=str(model_dir),
        scheduler_cls=scheduler_cls,
        additional_config={"sola_sched": options},
        middleware=["a.user.Middleware"],
    )
    for _ in range(2):
        AsyncEngineArgs.from_cli_args(args)

    is_ours = scheduler_cls == "sola_sched.Scheduler" and options.get("overload") != "nonsense"
    expected = ["a.user.Middleware", *([_MIDDLEWARE] if is_added else [])]
    always = [
        fates_http.MIDDLEWARE,
        options_http.MIDDLEWARE,
        "sola_sched.front_end.hints_http.HintsMiddleware",
    ]
    assert args.middleware == expected + (always if is_ours else [])


def test_arguments_without_middleware_are_left_alone(model_dir: Path) -> None:
    register()
    args = SimpleNamespace(
        model=str(model_dir),
        scheduler_cls="sola_sched.Scheduler",
        additional_config={"sola_sched": {"overload": "reject"}},
    )
    AsyncEngineArgs.from_cli_args(args)

    assert not hasattr(args, "middleware")
    module, _, name = _MIDDLEWARE.rpartition(".")
    assert (module, name) == (refusals.__name__, RefusalMiddleware.__name__)
