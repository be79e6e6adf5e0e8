"""Honest streams beside each kind of hostile client: their longest gap, and the memory."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from gateway.hostile_clients import KINDS, PATH
from harness.markdown import markdown
from harness.setup import Outcome, Setup

Row = dict[str, Any]
NUM_STREAMS = 100
#: How long the honest streams and the hostile clients are there together.
_TOGETHER_S = 8.0
_MIB = 2**20
_CLIENTS = Path(__file__).with_name("hostile_clients.py")
#: Streams a token each 50 ms to who asks for a stream, and has nothing to say to others.
_REPLICA = """
import asyncio
from aiohttp import web

async def answer(request):
    body = await request.read()
    if b'"stream": true' not in body[:200]:
        return web.json_response({})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    text = b"a" * (50_000 if b"LONG" in body[:200] else 1)
    for _ in range(180):
        await response.write(b'data: {"choices": [{"index": 0, "text": "' + text + b'"}]}\\n\\n')
        await asyncio.sleep(0.05)
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def main():
    app = web.Application(client_max_size=2**30)
    app.router.add_get("/sola/load", lambda _: web.Response(status=404))
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def hostile(setup: Setup) -> Outcome:
    """A row for each kind; the table is made of the last row of each.

    Raises:
        ConfigError: A kind is not known.
    """
    setup.check_only(tuple(KINDS))
    rows = setup.all_rows() if setup.is_stored else list(setup.keep(_measured(setup)))
    latest = {row["kind"]: row for row in rows}
    found = [latest[kind] for kind in KINDS if kind in latest]
    return Outcome(found, table(found))


def _measured(setup: Setup) -> Iterator[Row]:
    for kind in setup.only or KINDS:
        yield asyncio.run(beside(kind)) | {"load": round(os.getloadavg()[0], 1)}


async def beside(kind: str) -> Row:
    """Honest streams through a gateway while clients of this kind are there."""
    gaps: list[float] = []
    gateway = ("-m", "sola_sched.serving", "gateway", "--port", "0", "--replica")
    async with (
        _process("-c", _REPLICA) as (_, replica),
        _process(*gateway, replica) as (process, url),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        _process(str(_CLIENTS), kind, url, f"{_TOGETHER_S}") as (clients, _),
    ):
        await asyncio.gather(*(_honest(session, url, gaps) for _ in range(NUM_STREAMS)))
        assert clients.stdout is not None
        answers = (await clients.stdout.read()).decode().split()
        most_bytes = _most_bytes(process.pid)
    return {
        "kind": kind,
        "num_streams": NUM_STREAMS,
        "longest_gap_s": round(max(gaps), 3),
        "gateway_mib": round(most_bytes / _MIB),
        "answers": [int(answer) for answer in answers],
    }


@asynccontextmanager
async def _process(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and the last word of its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", *command, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _honest(session: aiohttp.ClientSession, url: str, gaps: list[float]) -> None:
    """One stream to its end; adds the times between its pieces."""
    async with session.post(url + PATH, json={"stream": True, "prompt": "hello"}) as reply:
        reply.raise_for_status()
        data, last_s = b"", time.monotonic()
        async for piece in reply.content.iter_any():
            data = piece
            gaps.append(time.monotonic() - last_s)
            last_s += gaps[-1]
        if not data.endswith(b"data: [DONE]\n\n"):
            raise SystemExit("error: an honest stream has not ended.")


def _most_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def table(rows: Sequence[Row]) -> str:
    """A line for each kind."""
    lines = [
        [row["kind"], f"{row['longest_gap_s']:.2f} s", f"{row['gateway_mib']:,} MiB",
         ", ".join(map(str, row["answers"]))]
        for row in rows
    ]  # fmt: skip
    head = (
        "hostile clients", "longest gap of a stream", "most memory of the gateway", "answered with",
    )  # fmt: skip
    loads = [row["load"] for row in rows]
    about = (
        f"{NUM_STREAMS} streams of a token each 50 ms through one gateway, and hostile clients "
        f"beside them for {_TOGETHER_S:g} s. Everything shares {os.cpu_count()} cores; their load "
        f"average, with this, was {min(loads):.1f} to {max(loads):.1f}."
    )
    return f"{about}\n\n{markdown(head, lines)}"
