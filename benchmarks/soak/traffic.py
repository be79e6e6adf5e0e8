"""The clients of the soak: what they ask, when they leave, and what they are answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from soak.paths import CUT_HEADER, SESSION

COMPLETIONS = "/v1/completions"
#: Of what is answered; what is called otherwise must not happen.
ANSWERED, REFUSED, LEFT = "answered", "refused", "left"
#: Seconds after which a client leaves, and a share that leaves at once or in between.
PATIENCE_S = 15.0
_SHARE_LEAVING = 0.08
_SHARE_SESSIONS, _SHARE_PLAIN, _SHARE_FORKED, _SHARE_KNOWN = 0.05, 0.12, 0.05, 0.1
_NUM_KNOWN = 12
#: Of streams; those that go to the engine behind the cutter go on at the other one.
_SHARE_CUT = 0.1
_TEXT_IDS = range(10, 250)
_REFUSALS = (429, 503)


class Clients:
    """Sends requests of many kinds to a gateway.

    Args:
        url: Of the gateway.
        seed: Of what they ask.

    Attributes:
        outcomes: How many were answered how.
        examples: An answer of each outcome that must not happen.
        tokens: That were received.
    """

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._session = url, _session()
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        known = random.Random(1)
        self._known = [self._prompt(known, 20, 120) for _ in range(_NUM_KNOWN)]
        self._answers: dict[int, str] = {}

    @property
    def num_sent(self) -> int:
        """Requests so far."""
        return self._num_sent

    @property
    def num_under_way(self) -> int:
        """Requests that wait for the rest of an answer."""
        return len(self._tasks)

    async def learn(self) -> None:
        """Ask the prompts whose answer never changes, one after another."""
        for place in range(_NUM_KNOWN):
            await self._counted(self._ask_known(place))

    def send(self, *, leaves: bool = True) -> asyncio.Task[None]:
        """Send one request of a random kind; `leaves` lets it leave before its end."""
        task = asyncio.create_task(self._counted(self._one(leaves)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def until_all_ended(self) -> None:
        """Wait for the rest of all answers, and close all connections; others may be opened."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.close()
        self._session = _session()

    async def close(self) -> None:
        """Close all connections for good."""
        await self._session.close()

    async def _counted(self, asking: Any) -> None:
        self._num_sent += 1
        try:
            outcome = await asking
        except Exception as error:
            outcome = f"{type(error).__name__}"
            self.examples.setdefault(outcome, repr(error))
        self.outcomes[outcome] += 1

    async def _one(self, leaves: bool) -> str:
        rng = self._rng
        patience_s = PATIENCE_S
        if leaves and rng.random() < _SHARE_LEAVING:
            patience_s = rng.choice((0.0, 0.05, rng.uniform(0.0, 5.0)))
        kind = rng.random()
        if kind < _SHARE_SESSIONS:
            asking = self._ask_session()
        elif kind < _SHARE_SESSIONS + _SHARE_KNOWN:
            asking = self._ask_known(rng.randrange(_NUM_KNOWN))
        else:
            asking = self._ask_any(kind)
        try:
            async with asyncio.timeout(patience_s if leaves else None):
                return await asking
        except TimeoutError:
            return LEFT

    def _prompt(self, rng: random.Random, least: int, most: int) -> list[int]:
        return [rng.choice(_TEXT_IDS) for _ in range(rng.randint(least, most))]

    async def _ask_any(self, kind: float) -> str:
        rng = self._rng
        share = _SHARE_SESSIONS + _SHARE_KNOWN
        body: dict[str, Any] = {
            "prompt": self._prompt(rng, 5, rng.choice((60, 250, 350))),
            "max_tokens": rng.choice((1, 8, 30, 90)),
            "stream": kind >= share + _SHARE_PLAIN,
            "priority": rng.choice((0, 0, 0, 1, -1)),
        }
        if kind < share + _SHARE_FORKED:
            body |= {"n": 2, "temperature": 1.0}
        targets: dict[str, Any] = rng.choice(
            ({}, {"slo_class": "chat"}, {"slo_class": "batch"},
             {"ttft_slo_ms": 400, "tpot_slo_ms": 80}, {"e2e_slo_ms": 5000})
        )  # fmt: skip
        if targets:
            body["vllm_xargs"] = targets
        return await self._complete(body)

    async def _ask_known(self, place: int) -> str:
        """A prompt that was asked before: its answer is the same, however often it is cut."""
        body = {"prompt": self._known[place], "max_tokens": 40, "stream": True}
        texts: list[str] = []
        outcome = await self._complete(body, texts)
        if outcome == ANSWERED and (text := "".join(texts)) != self._answers.setdefault(
            place, text
        ):
            self.examples.setdefault("another answer", f"{self._answers[place]!r} != {text!r}")
            return "another answer"
        return outcome

    async def _ask_session(self) -> str:
        rng = self._rng
        prompts = [self._prompt(rng, 5, 80) for _ in range(rng.randint(2, 4))]
        body: dict[str, Any] = {
            "prompts": prompts, "max_tokens": rng.randint(1, 20), "pause_s": rng.uniform(0, 0.8),
            "name": f"session-{self._num_sent}",
        }  # fmt: skip
        async with self._session.post(self._url + SESSION, json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                return self._not_ok(reply.status, text)
            tokens = json.loads(text)["tokens"]
        self.tokens += tokens
        wanted = len(prompts) * body["max_tokens"]
        return self._whole(tokens == wanted, f"session: {tokens} of {wanted} tokens")

    async def _complete(self, body: dict[str, Any], texts: list[str] | None = None) -> str:
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
        headers = {}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
            if self._rng.random() < _SHARE_CUT:
                headers[CUT_HEADER] = str(self._rng.randint(1, 30))
        async with self._session.post(self._url + COMPLETIONS, json=body, headers=headers) as reply:
            if reply.status != 200:
                return self._not_ok(reply.status, await reply.text())
            if body["stream"]:
                usage = await self._read(reply, texts)
            else:
                usage = (await reply.json())["usage"]["completion_tokens"]
        self.tokens += usage if isinstance(usage, int) else 0
        if headers and "no other replica takes" in str(usage):
            return REFUSED  # the stream was cut, and its client is told that it does not go on
        wanted = body.get("n", 1) * body["max_tokens"]
        return self._whole(usage == wanted, f"{usage!r} of {wanted} tokens")

    async def _read(self, reply: aiohttp.ClientResponse, texts: list[str] | None) -> Any:
        """The number of tokens at a stream's end; what it said instead, where it has none."""
        usage, last = None, ""
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            last = line[6:].decode().strip()
            if last == "[DONE]":
                break
            event = json.loads(last)
            if "error" in event:
                return f"error event: {event['error']}"
            if event.get("usage"):
                usage = event["usage"]["completion_tokens"]
            if texts is not None:
                texts.extend(choice["text"] for choice in event["choices"])
        return usage if last == "[DONE]" else f"the stream ended after {last!r}"

    def _whole(self, is_whole: bool, text: str) -> str:
        if is_whole:
            return ANSWERED
        self.examples.setdefault("incomplete", text)
        return "incomplete"

    def _not_ok(self, status: int, text: str) -> str:
        if status in _REFUSALS:
            with suppress(ValueError, KeyError, TypeError):
                if json.loads(text)["error"]["message"]:
                    return REFUSED
        self.examples.setdefault(f"HTTP {status}", text[:500])
        return f"HTTP {status}"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


@asynccontextmanager
async def clients(url: str, seed: int) -> AsyncIterator[Clients]:
    """Clients of a gateway, with connections of their own."""
    made = Clients(url, seed)
    try:
        yield made
    finally:
        await made.close()


async def offer(one: Clients, rate_per_s: float, seconds: float, seed: int) -> None:
    """Send requests at this rate, at random, for so long."""
    rng = random.Random(seed)
    end_s = due_s = time.monotonic()
    end_s += seconds
    while due_s < end_s:
        due_s += rng.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        one.send()


async def served_per_s(one: Clients, num_clients: int, seconds: float) -> float:
    """What is answered each second while so many clients ask without a pause."""
    end_s = time.monotonic() + seconds
    start = one.outcomes[ANSWERED]

    async def again_and_again() -> None:
        while time.monotonic() < end_s:
            await one.send(leaves=False)

    began_s = time.monotonic()
    await asyncio.gather(*(again_and_again() for _ in range(num_clients)))
    return (one.outcomes[ANSWERED] - start) / (time.monotonic() - began_s)
