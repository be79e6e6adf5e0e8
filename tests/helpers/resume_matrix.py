"""Streams cut at each event and resumed, beside the same stream uncut."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from cutting import CUT_HEADER
from resume_bodies import SECRET, Body

#: Log probabilities of a prefill and of a decode step differ by this much.
_CLOSE = 2e-3
_AT_ONCE = 8


@dataclass
class Stream:
    """What a client has got.

    Attributes:
        status: Of HTTP.
        num_events: All but comments.
        texts, ids, finish_reasons, logprobs: Of each choice.
        usage: The last one.
        error: Of the stream.
        is_ended: Whether it had its `[DONE]`.
    """

    status: int = 200
    num_events: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_ended: bool = False

    def read(self, raw: bytes) -> None:
        """All events."""
        for event in raw.split(b"\n\n"):
            if not event or event.startswith(b":"):
                continue
            self.num_events += 1
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                self.is_ended = True
                continue
            self._add(json.loads(data))

    def _add(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]
            if logprobs := choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(_each_logprob(logprobs))


def _each_logprob(logprobs: dict[str, Any]) -> list[tuple[Any, ...]]:
    if "content" in logprobs:
        return [(each["token"], each["logprob"]) for each in logprobs["content"]]
    return list(
        zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True
        )
    )  # fmt: skip


async def ask(
    session: aiohttp.ClientSession, url: str, body: Body, cuts: Sequence[int] = ()
) -> Stream:
    """One stream, cut after so many events of each attempt."""
    headers = {CUT_HEADER: ",".join(map(str, cuts))} if cuts else {}
    whole = {"model": "tiny", "stream": True, **body.body}
    async with session.post(url + body.path, json=whole, headers=headers) as reply:
        got = Stream(status=reply.status)
        got.read(await reply.read())
        return got


def verdict(body: Body, got: Stream, uncut: Stream) -> str:
    """`as uncut`, `error` for one that the protocol tells of, or what is wrong."""
    if not got.is_ended or got.status != 200:
        return f"wrong: no end, HTTP {got.status}"
    if any(SECRET in text for text in got.texts.values()) and "echo" not in body.body:
        return "wrong: the prompt is in the answer"
    if got.error is not None:
        begins = body.is_sampled or all(
            uncut.texts[index].startswith(text) for index, text in got.texts.items()
        )
        return "error" if begins else "wrong: text before the error"
    for name in ("finish_reasons", "usage") if body.is_sampled else (
        "texts", "ids", "finish_reasons", "usage",
    ):  # fmt: skip
        if getattr(got, name) != getattr(uncut, name) and not _may_differ(body, name, got):
            return f"wrong {name}: {getattr(got, name)} for {getattr(uncut, name)}"
    if body.is_sampled:
        return "as uncut"
    return "as uncut" if _are_close(got.logprobs, uncut.logprobs) else "wrong: log probabilities"


def _may_differ(body: Body, name: str, got: Stream) -> bool:
    """A sampled answer may have its end earlier, with fewer tokens."""
    if not body.is_sampled:
        return False
    if name == "finish_reasons":
        return set(got.finish_reasons.values()) <= {"stop", "length"} and bool(got.finish_reasons)
    usage = got.usage or {}
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    return bool(usage["total_tokens"] == total)


def _are_close(got: dict[int, list[Any]], uncut: dict[int, list[Any]]) -> bool:
    if {i: len(each) for i, each in got.items()} != {i: len(each) for i, each in uncut.items()}:
        return False
    pairs = [pair for i in uncut for pair in zip(got[i], uncut[i], strict=True)]
    return all(
        (a[0], a[2:]) == (b[0], b[2:])
        and (a[1] is None or b[1] is None or a[1] == pytest.approx(b[1], abs=_CLOSE))
        for a, b in pairs
    )


async def run(
    gateway_url: str, server_url: str, bodies: Iterable[Body], step: int = 1
) -> tuple[Counter[str], list[str]]:
    """Cut each body's stream after each `step`-th event.

    Returns:
        How many streams had each verdict, and what was wrong or failed although it must not.
    """
    counts: Counter[str] = Counter()
    faults: list[str] = []
    limit = asyncio.Semaphore(_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(body: Body, uncut: Stream, cuts: Sequence[int]) -> None:
            async with limit:
                got = await ask(session, gateway_url, body, cuts)
            found = verdict(body, got, uncut)
            kind = found if found in ("as uncut", "error") else "wrong"
            counts[kind] += 1
            if kind == "wrong" or (kind == "error" and not body.may_fail):
                faults.append(f"{body.name}, cut after {cuts}: {found} {got.error or ''}")

        for body in bodies:
            uncut = await ask(session, server_url, body)
            if (uncut.error or {}).get("code") == 400:
                counts["bodies that the server refuses"] += 1
                continue
            assert (uncut.is_ended, uncut.error) == (True, None), (body.name, uncut)
            points = range(1, uncut.num_events, step)
            twice = [(point, 1 + point % 3) for point in points[:: max(1, len(points) // 4)]]
            await asyncio.gather(
                *(one(body, uncut, cuts) for cuts in [*((point,) for point in points), *twice])
            )
    return counts, faults
