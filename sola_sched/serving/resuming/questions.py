"""What a gateway asks a replica before a stream goes on there.

The questions go to paths that every vLLM server has, and cost its engine nothing. A server that
answers otherwise does not say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from sola_sched.proxy.upstream import NOT_CONNECTED
from sola_sched.serving.resuming.asked import Asked
from sola_sched.serving.resuming.rewrite import shows_all
from sola_sched.serving.resuming.transcript import ChoiceSent

#: Most that an answer may take.
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
#: More than any limit: vLLM refuses a request that asks for more tokens than it may have, and says
#: how many these are.
_TOO_MANY = 2**31 - 1
_LIMIT = re.compile(r"max_tokens=(\d+)")
#: Most tokens at the end of a stream that are taken for the beginning of a character.
_MOST_HELD = 64


class Questions:
    """Asks one replica.

    Args:
        session: Connections to it.
        url: Its own, without a trailing slash.
        headers: Those of the request.

    All methods raise what a request of the session raises where no connection can be made, or
    nothing comes.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
    ) -> None:
        self._session, self._url, self._headers = session, url, headers

    async def max_tokens(self, asked: Asked) -> int | None:
        """Most output tokens that this request has there; None where that is not to be known.

        A server may have a limit of its own, for requests without one or for all.
        """
        _, models = await self._ask("GET", "/v1/models")
        if not _are_of_vllm(models):
            return asked.max_tokens or _TOO_MANY
        body = {**asked.body, "min_tokens": _TOO_MANY, "stream": False}
        body.pop("stream_options", None)
        status, answer = await self._ask("POST", asked.path, body)
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        found = _LIMIT.search(message) if isinstance(message, str) else None
        if status == HTTPStatus.BAD_REQUEST and found:
            return int(found[1])
        return asked.max_tokens

    async def num_told(self, asked: Asked, choice: ChoiceSent) -> int | None:
        """Tokens of a choice whose text is all that was sent; None where that is not to be known.

        The events mostly say it themselves. Where there was reasoning, a parser stands behind them,
        which may hold text back.
        """
        is_parsed = choice.texts.keys() > {"content"}
        if choice.num_told is not None and not is_parsed:
            return choice.num_told
        num = len(choice.token_ids)
        for num_tokens in range(num, max(choice.num_before, num - _MOST_HELD), -1):
            body = {"model": asked.body.get("model"), "tokens": choice.token_ids[:num_tokens]}
            status, answer = await self._ask("POST", "/detokenize", body)
            text = answer.get("prompt")
            if status != HTTPStatus.OK or not isinstance(text, str):
                return choice.num_told
            if shows_all(text, choice, is_chat=asked.is_chat):
                return num_tokens
        return None

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Status and object of an answer; the latter is empty where it is none."""
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=self._headers, timeout=_TIMEOUT,
                allow_redirects=False,
            ) as reply:  # fmt: skip
                status, data = reply.status, await reply.read()
            answer = json.loads(data)
        except NOT_CONNECTED:
            raise
        except (aiohttp.ClientError, ValueError):
            return HTTPStatus.BAD_GATEWAY, {}
        return status, answer if isinstance(answer, dict) else {}


def _are_of_vllm(models: Mapping[str, Any]) -> bool:
    rows = models.get("data")
    return isinstance(rows, list) and any(
        isinstance(row, dict) and row.get("max_model_len") is not None for row in rows
    )
