"""A hundred honest streams beside each kind of hostile client: their longest gap, and the memory.

`pytest -s tests/proxy/test_hostile_clients.py -m slow` prints a line for each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from hostile_clients import KINDS, PATH

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

NUM_STREAMS = 100
#: How long the honest streams and the hostile clients are there together.
TOGETHER_S = 8.0
HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
#: Of a machine that others use too; bodies of 10 MB used to stop all streams for six seconds.
_MOST_GAP_S = 3.0
_MOST_BYTES = 2**30
#: Streams a token each 50 ms to who asks for a stream, and has nothing to say to others.
REPLICA = """
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
HOSTILE = """
import sys
sys.path.insert(0, sys.argv[1])
from hostile_clients import main
print("ready", flush=True)
main(sys.argv[2], sys.argv[3], float(sys.argv[4]))
"""


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
    async with session.post(url + PATH, json={"stream": True, "prompt": "hello"}) as reply:
        assert reply.status == 200
        data, last_s = b"", time.monotonic()
        async for piece in reply.content.iter_any():
            data = piece
            gaps.append(time.monotonic() - last_s)
            last_s += gaps[-1]
        assert data.endswith(b"data: [DONE]\n\n")


def _most_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_honest_streams_go_on_beside_hostile_clients(kind: str) -> None:
    async def test() -> None:
        gaps: list[float] = []
        gateway = ("-m", "sola_sched.serving", "gateway", "--port", "0", "--replica")
        async with (
            _process("-c", REPLICA) as (_, replica),
            _process(*gateway, replica) as (process, url),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            _process("-c", HOSTILE, HELPERS, kind, url, f"{TOGETHER_S}") as (hostile, _),
        ):
            streams = [_honest(session, url, gaps) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*streams)
            assert hostile.stdout is not None
            answers = (await hostile.stdout.read()).decode().strip()
            most = _most_bytes(process.pid)
        print(
            f"\n{kind}: longest gap of {NUM_STREAMS} streams {max(gaps):.2f} s, gateway "
            f"{most / 2**20:.0f} MiB, answers {answers}"
        )
        assert max(gaps) < _MOST_GAP_S
        assert most < _MOST_BYTES

    asyncio.run(test())
