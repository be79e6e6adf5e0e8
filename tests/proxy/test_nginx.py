"""The page's example with nginx before the gateway: TLS, keys, streams that are not held back."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from fake_replica import FakeReplica, output_of

ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"

pytestmark = [
    pytest.mark.skipif(shutil.which(program, path=PATHS) is None, reason=f"needs {program}")
    for program in ("nginx", "openssl", "curl")
]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _replaced(text: str, **others: str) -> str:
    """The text with other addresses, all of which must be there."""
    for old, new in others.items():
        assert old in text
        text = text.replace(old, new)
    return text


def _commands(folder: Path, replica_url: str) -> tuple[str, int]:
    """The page's commands, on ports that are free; and nginx's port."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(.*?nginx.*?)```", page, flags=re.S)
    port, gateway_port = _free_port(), _free_port()
    example = Path("examples", "cluster", "nginx.conf")
    (folder / example).parent.mkdir(parents=True)
    text = (ROOT / example).read_text(encoding="utf-8")
    text = _replaced(text, **{"127.0.0.1:8000": f"127.0.0.1:{gateway_port}",
                              "listen 8443": f"listen 127.0.0.1:{port}"})  # fmt: skip
    (folder / example).write_text(text, encoding="utf-8")
    others = {"http://localhost:8001": replica_url, "--port 8000": f"--port {gateway_port}",
              "localhost:8443": f"localhost:{port}"}  # fmt: skip
    return _replaced(block, **others), port


@asynccontextmanager
async def _running(commands: str, folder: Path) -> AsyncIterator[str]:
    """Run them and what they start; gives what they have written."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-e", "-c", f"{commands}\necho; echo the end; wait", cwd=folder,
        env=os.environ | {"PATH": PATHS}, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield (await process.stdout.readuntil(b"the end\n")).decode()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        await process.wait()


def test_the_pages_example_runs_and_streams_pass_event_by_event(tmp_path: Path) -> None:
    fake, folder = FakeReplica(token_s=0.05), tmp_path / "tls"

    async def test() -> None:
        async with fake.running():
            commands, port = _commands(tmp_path, fake.url)
            async with _running(commands, tmp_path) as written:
                assert '"id": "fake"' in written
                await talk(f"https://localhost:{port}", (folder / "keys").read_text().strip())

    async def talk(url: str, key: str) -> None:
        trust = ssl.create_default_context(cafile=folder / "cert.pem")
        headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "6.6.6.6"}
        body: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 10, "stream": True}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 401
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                pieces = [piece async for piece in reply.content.iter_any()]
            async with session.post(f"{url}/sleep", headers=headers) as reply:
                assert reply.status == 404
            long = b"x" * (17 * 2**20)
            async with session.post(f"{url}/v1/completions", data=long) as reply:
                assert reply.status == 413
        text = b"".join(pieces)
        assert text.count(b'"text":') == 10
        assert len(pieces) > 5
        assert text.endswith(b"data: [DONE]\n\n")
        assert fake.headers[0]["x-forwarded-for"] == "127.0.0.1, 127.0.0.1"
        assert output_of("hi", 1) in text.decode()

    asyncio.run(asyncio.wait_for(test(), 60))
