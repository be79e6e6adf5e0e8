"""What vLLM's server offers to programs and not over HTTP, for the clients of the soak.

After `POST /soak/start` copies of KV fail. `POST /soak/session` has one request with several inputs
that stream in; `POST /soak/pause` holds the engine for a while, and `POST /soak/reset` clears its
prefix cache beside running requests.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind

from soak import census
from soak.paths import FOLDER, PAUSE, RESET, ROLE, SESSION, START


class Driven:
    """Answers these paths.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        census.start(Path(os.environ[FOLDER]), f"{os.environ[ROLE]} server")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        doing = _DOING.get(scope.get("path", ""))
        if scope["type"] != "http" or doing is None:
            await self.app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        engine = scope["app"].state.engine_client
        work = asyncio.create_task(doing(engine, json.loads(body or b"{}")))
        gone = asyncio.create_task(_until_gone(receive))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            return
        error = work.exception()
        status, answer = HTTPStatus.OK, {"error": {"message": repr(error)}}
        if error is None:
            answer = work.result()
        elif "could not have met its targets" in str(error):
            status = HTTPStatus.SERVICE_UNAVAILABLE
        else:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status.value, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _session(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=body["max_tokens"],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        for prompt in body["prompts"]:
            yield StreamingInput(prompt={"prompt_token_ids": prompt}, sampling_params=params)
            await asyncio.sleep(body["pause_s"])

    tokens = 0
    async for output in engine.generate(inputs(), params, body["name"]):
        tokens += sum(len(each.token_ids) for each in output.outputs)
    return {"tokens": tokens}


async def _pause(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    await engine.pause_generation(mode="keep", clear_cache=False)
    try:
        await asyncio.sleep(body["seconds"])
    finally:
        await engine.resume_generation()
    return {}


async def _reset(engine: Any, _: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": await engine.reset_prefix_cache(reset_running_requests=True)}
    except Exception as error:
        if "Failed to reset KV cache" in str(error):  # sessions keep theirs between two inputs
            return {"done": False}
        raise


async def _start(engine: Any, _: dict[str, Any]) -> dict[str, Any]:
    await engine.collective_rpc("fail_copies")
    return {}


_DOING = {SESSION: _session, PAUSE: _pause, RESET: _reset, START: _start}
