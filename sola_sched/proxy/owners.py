"""Which server has what a client comes back to: a stored response, or a session."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from typing import Generic, TypeVar

Server = TypeVar("Server")

#: The oldest are forgotten.
_MOST = 100_000
#: The first name of an answer is its own; vLLM writes it first.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')


class Owners(Generic[Server]):
    """Servers by what they have.

    Args:
        most: Entries that are kept.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._servers: OrderedDict[bytes, Server] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._servers)

    def of(self, key: str) -> Server | None:
        """The server, as far as it is known."""
        return self._servers.get(_digest(key))

    def learn(self, key: str, server: Server) -> None:
        """The server has it now."""
        digest = _digest(key)
        self._servers[digest] = server
        self._servers.move_to_end(digest)
        if len(self._servers) > self._most:
            self._servers.popitem(last=False)


def _digest(key: str) -> bytes:
    """What is kept of a key, which a client may make long."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()


def of_response(response_id: str) -> str:
    """The key of a stored response."""
    return f"response {response_id}"


def response_id(data: bytes) -> str | None:
    """The id in the beginning of an answer of `/v1/responses`, an object or a stream of them."""
    found = _ID.search(data)
    return found[1].decode(errors="replace") if found is not None else None
