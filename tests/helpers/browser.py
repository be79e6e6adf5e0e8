"""A headless Chromium that tests ask what a page shows, over its own debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_START_S = 60.0


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


class Tab:
    """One page in a browser.

    Attributes:
        requested: Addresses that the page has asked for.
        errors: What its scripts have raised, and what was refused.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.requested: list[str] = []
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_START_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._noted(message)

    def _noted(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])

    async def open(self, path: Path, *, width: int = 1200, scheme: str = "light") -> None:
        """Show a file at this width, to a reader who has asked for light or dark."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])
        await self.call("Page.navigate", url=path.as_uri())
        for _ in range(300):
            if await self.value("document.readyState") == "complete":
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)  # for what is drawn after that

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        """A key, down and up."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **text,
            )  # fmt: skip

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which keeps its files in `folder` and ends with the block."""
    process = subprocess.Popen(
        [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        told = folder / "DevToolsActivePort"
        for _ in range(int(_START_S / 0.1)):
            if told.exists() and "\n" in told.read_text():
                break
            assert process.poll() is None, f"Chromium ended with {process.returncode}"
            await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait(30)
