"""Clients that mean no good, as a process of their own: its arguments are those of `main`."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from yarl import URL

PATH = "/v1/completions"


@dataclass
class Hostile:
    """Clients that mean no good.

    Attributes:
        url: Of the gateway.
        writers: Of those that stay connected.
        statuses: What they have been answered.
    """

    url: str
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    async def send(self, *pieces: bytes, num: int, pause_s: float = 0.0) -> None:
        """So many connections that send this, and then nothing."""
        for _ in range(num):
            _, writer = await self._connection()
            self.writers.append(writer)
            writer.write(pieces[0])
        for piece in pieces[1:]:
            for writer in self.writers:
                writer.write(piece)
            await asyncio.sleep(pause_s)

    async def again_and_again(self, data: bytes, num: int) -> None:
        """So many clients that send this and read the answer, over and over."""

        async def one() -> None:
            while True:
                reader, writer = await self._connection()
                writer.write(data)
                with contextlib.suppress(ConnectionError):
                    answer = await reader.read()
                    self.statuses.add(int(answer.split(b" ", 2)[1]) if answer else 0)
                writer.close()

        await asyncio.gather(*(one() for _ in range(num)))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = URL(self.url)
        return await asyncio.open_connection(address.host, address.port)


def _post(path: str, body: bytes, line: str = "") -> bytes:
    """A request after which the connection ends; the line tells of the body, or is its length."""
    told = line or f"Content-Length: {len(body)}"
    if line.startswith("Content-Encoding"):
        told += f"\r\nContent-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{told}\r\n\r\n"
    return head.encode() + body


async def _packed(hostile: Hostile) -> None:
    body = gzip.compress(b'{"prompt":[' + b"1, " * 6_700_000 + b"1]}")
    await hostile.again_and_again(_post(PATH, body, "Content-Encoding: gzip"), 20)


async def _numbers(hostile: Hostile) -> None:
    body = b'{"prompt":[' + b"1," * 5_000_000 + b'1],"max_tokens":1}'
    await hostile.again_and_again(_post(PATH, body), 2)


async def _lists(hostile: Hostile) -> None:
    body = b'{"messages":[' + b"[]," * 5_000_000 + b'1],"max_tokens":1}'
    await hostile.again_and_again(_post("/v1/chat/completions", body), 2)


async def _deep(hostile: Hostile) -> None:
    body = b'{"prompt":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}"
    await hostile.again_and_again(_post(PATH, body), 5)


async def _members(hostile: Hostile) -> None:
    body = gzip.compress(b"") * 800_000
    await hostile.again_and_again(_post(PATH, body, "Content-Encoding: gzip"), 5)


async def _forms(hostile: Hostile) -> None:
    body = gzip.compress(b"--a\r\n\r\n\r\n" * 1_800_000 + b"--a--")
    lines = "Content-Encoding: gzip\r\nContent-Type: multipart/form-data; boundary=a"
    await hostile.again_and_again(_post("/v1/audio/transcriptions", body, lines), 5)


async def _half_heads(hostile: Hostile) -> None:
    await hostile.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", num=2000)


async def _half_bodies(hostile: Hostile) -> None:
    head = _post(PATH, b"{", "Content-Length: 16000000")
    await hostile.send(head, *[b" " * 50_000] * 20, num=200, pause_s=0.1)


async def _many_connections(hostile: Hostile) -> None:
    await hostile.send(b"", num=6000)


async def _no_readers(hostile: Hostile) -> None:
    body = json.dumps({"prompt": "LONG", "stream": True}).encode()
    await hostile.send(_post(PATH, body), num=50)


async def _nobody(hostile: Hostile) -> None:
    """For comparison."""


KINDS: dict[str, Callable[[Hostile], Awaitable[None]]] = {
    "nobody": _nobody,
    "compressed bodies of 20 MB": _packed,
    "bodies of 10 MB of numbers": _numbers,
    "bodies of 15 MB of lists": _lists,
    "bodies that nest 5,000,000 deep": _deep,
    "16 MB of empty gzip members": _members,
    "forms of 1,800,000 parts": _forms,
    "2,000 half heads": _half_heads,
    "200 half bodies of 1 MB": _half_bodies,
    "6,000 idle connections": _many_connections,
    "50 that do not read": _no_readers,
}


def main(kind: str, url: str, seconds: float) -> None:
    """Be there for so long, and print what was answered."""
    hostile = Hostile(url)

    async def attack() -> None:
        async with asyncio.timeout(seconds):
            await KINDS[kind](hostile)
            await asyncio.Event().wait()

    print("there", flush=True)
    with contextlib.suppress(TimeoutError):
        asyncio.run(attack())
    print(*sorted(hostile.statuses))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
