"""What happens beside the requests: options change, engines pause, caches are cleared."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from harness.files import replace_text
from soak.engines import Servers
from soak.paths import PAUSE, RESET, START

#: Contents of the options file in turn; None is no file, and the second is refused.
_OPTIONS: tuple[Any, ...] = (
    {"ttft_s": 0.3}, {"ttft_s": "soon"}, {"steer": False},
    {"steer": True, "best_effort_share": 0.1}, {"max_wait_s": 5.0}, None,
    {"tpot_s": 0.02, "log_missed": 0.1},
)  # fmt: skip


async def disturb(
    there: Servers, session: aiohttp.ClientSession, every_s: float, done: Counter[str], seed: int
) -> None:
    """Disturb one engine or another, until cancelled.

    Args:
        every_s: Between two disturbances, on average.
        done: How many of each kind there were; counted here.
    """
    rng = random.Random(seed)
    contents = itertools.cycle(_OPTIONS)
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
        name = rng.choice(list(there.urls))
        kind = rng.choice(("options", "pauses", "resets"))
        if kind == "options":
            _write(there.options[name], next(contents))
        elif kind == "resets":
            if not (await _post(session, there.urls[name] + RESET, {}))["done"]:
                kind = "resets refused"
        else:
            await _post(session, there.urls[name] + PAUSE, {"seconds": rng.uniform(0.1, 1.5)})
        done[kind] += 1


async def start(there: Servers, session: aiohttp.ClientSession) -> None:
    """Have copies of KV fail from now on."""
    for url in there.urls.values():
        await _post(session, url + START, {})


def calm(there: Servers) -> None:
    """Take the options back to those of the start."""
    for path in there.options.values():
        path.unlink(missing_ok=True)


def _write(path: Path, content: Any) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    replace_text(path, json.dumps(content))


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json=body) as reply:
        text = await reply.text()
        if reply.status != 200:
            raise RuntimeError(f"{url} must do what it is asked (got {text}).")
        return json.loads(text)
