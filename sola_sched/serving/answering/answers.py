"""An answer of a replica that is no stream of events: how much of it is kept, what it tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
from multidict import CIMultiDict

#: Answers that another replica may do better than.
FAILURES = frozenset((500, 502, 504))
#: Bytes that are kept until an answer is whole, which can be had elsewhere if it breaks off; a
#: longer one goes on to its client as it comes.
MOST_KEPT = 2**18
#: What vLLM says of a prompt that is too long for it.
_TOO_LONG = re.compile(rb"maximum (?:context|model|input) length|max_model_len", re.IGNORECASE)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None  # as OpenAI's first paths call it
    input_tokens: int | None = None  # as Responses and Anthropic's Messages do
    cache_read_input_tokens: int | None = None  # which Messages do not count as input
    cache_creation_input_tokens: int | None = None

    @property
    def num_prompt(self) -> int | None:
        """Tokens of the whole prompt."""
        if self.input_tokens is None:
            return self.prompt_tokens
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.prompt_tokens or self.input_tokens + cached


class _Told(msgspec.Struct):
    usage: _Usage | None = None


_TOLD = msgspec.json.Decoder(_Told)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def is_failure(self) -> bool:
        """Whether the replica has failed at what another one may do."""
        return self.status in FAILURES

    @property
    def is_of_length(self) -> bool:
        """Whether the request is too long for the replica."""
        return self.status == HTTPStatus.BAD_REQUEST and _TOO_LONG.search(self.body) is not None

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, where it names them; no objects are made of the rest."""
        if self.status != HTTPStatus.OK:
            return None
        try:
            usage = _TOLD.decode(self.body).usage
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None
        return None if usage is None else usage.num_prompt

    @property
    def retry_after_s(self) -> float:
        """When it asks to be tried again; later than all if it does not say."""
        try:
            return float(self.headers.get("Retry-After", "inf"))
        except ValueError:  # a date
            return float("inf")


async def beginning(reply: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The beginning of an answer's body, and whether it is all of it."""
    data = bytearray()
    async for piece in reply.content.iter_any():
        data += piece
        if len(data) > MOST_KEPT:
            return bytes(data), False
    return bytes(data), True
