"""The example with nginx before the gateway: TLS, keys, and streams that are not held back."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from fake_replica import FakeReplica, output_of
from gateway_clients import gateway_before

from sola_sched.proxy.keys import keys_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "nginx.conf"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


def _with_files(folder: Path, gateway_url: str) -> tuple[Path, int]:
    """The example beside a certificate, before a gateway elsewhere; and its port."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    )
    subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    (folder / "nginx-tmp").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = EXAMPLE.read_text(encoding="utf-8")
    assert "127.0.0.1:8000" in text
    assert "listen 8443" in text
    text = text.replace("127.0.0.1:8000", gateway_url.removeprefix("http://"))
    config = folder / "nginx.conf"
    config.write_text(text.replace("listen 8443", f"listen 127.0.0.1:{port}"), encoding="utf-8")
    return config, port


def test_streams_with_a_key_pass_through_nginx_event_by_event(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of tests\nsecret\n", encoding="utf-8")
    keys = keys_of(None, tmp_path / "keys")
    fake = FakeReplica(token_s=0.05)
    body: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 10, "stream": True}

    async def test() -> None:
        async with gateway_before(fake, keys=keys) as client:
            config, port = await asyncio.to_thread(_with_files, tmp_path, client.url)
            nginx = await asyncio.create_subprocess_exec(
                str(NGINX), "-e", "stderr", "-p", str(tmp_path), "-c", str(config)
            )
            try:
                await talk(f"https://localhost:{port}")
            finally:
                nginx.terminate()
                await nginx.wait()

    async def talk(url: str) -> None:
        trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        headers = {"Authorization": "Bearer secret", "X-Forwarded-For": "6.6.6.6"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
            await _until_it_listens(session, url)
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


async def _until_it_listens(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 200
                return
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)
