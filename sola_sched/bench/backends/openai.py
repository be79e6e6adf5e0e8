"""Replays a workload over HTTP against a running OpenAI-compatible server, streaming."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from sola_sched.bench.backends.base import OnDone, RunOutcome, SchedulerSpec, extra_args, record_of
from sola_sched.config.rules import shown
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import FIRST_PLAIN_TOKEN, RequestSpec, Workload

_WARMUP = "warmup-"
#: Below the size of any vocabulary.
_NUM_FIRST_TOKENS = 200
#: Of one request; what says more counts something else.
_MOST_TOKENS = 1 << 24
_READY_POLL_S = 1.0
_READY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """Where the server is and what is sent to it.

    Attributes:
        base_url: Without a trailing slash, e.g. ``http://localhost:8000``.
        endpoint: Of completions.
        model: Name in the API; None takes the first model the server lists.
        tokenizer: Recorded in the results.
        headers: Added to every request. ``$OPENAI_API_KEY`` is sent as a bearer token.
        extra_body: Added to every request body.
        send_slo: Send the run's targets with requests that have none of their own.
        ready_timeout_s: How long to wait for the server to answer.
        stall_timeout_s: A request fails when no byte has come for this long.
        num_warmups: Requests sent before the clock starts.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    tokenizer: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    send_slo: bool = False
    ready_timeout_s: float = 0.0
    stall_timeout_s: float = 120.0
    num_warmups: int = 8


class OpenAIBackend:
    """A server that is already running; its scheduler is whatever it was started with.

    The first token of every prompt is replaced by one that is new in each run, so that a run
    does not find the prompts of an earlier one in the server's prefix cache; prefixes that
    prompts share within a run stay shared.
    """

    name = "openai"

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._url = options.base_url + options.endpoint
        self.model_id, self.max_model_len = asyncio.run(self._first_model())
        self.tokenizer_id = options.tokenizer or self.model_id
        self._num_runs = 0

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        """See ``Backend.run``. ``scheduler`` is only a label here."""
        self._num_runs += 1
        records = [record_of(request) for request in workload.requests]
        outcome = RunOutcome(records=records, duration_s=0.0)
        clock: list[float] = []
        try:
            asyncio.run(self._replay(workload, records, slo, max_concurrency, on_done, clock))
        except KeyboardInterrupt:
            outcome.interrupted = True
            left = [r for r in outcome.records if not r.completed and not r.error]
            for record in left:
                record.error = "interrupted by the user"
            outcome.notes.append(f"{len(left)} requests interrupted by the user.")
        outcome.duration_s = time.perf_counter() - clock[0] if clock else 0.0
        return outcome

    async def _replay(
        self,
        workload: Workload,
        records: Sequence[RequestRecord],
        slo: SloTarget,
        max_concurrency: int | None,
        on_done: OnDone | None,
        clock: list[float],
    ) -> None:
        gate: Any = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        )
        async with self._session() as session:
            warmups = workload.requests[: self.options.num_warmups]
            await asyncio.gather(
                *(
                    self._send(session, request, _warmup_record(request), slo, 0.0)
                    for request in warmups
                )
            )
            start_s = time.perf_counter()
            clock.append(start_s)

            async def one(request: RequestSpec, record: RequestRecord) -> None:
                await asyncio.sleep(start_s + request.arrival_s - time.perf_counter())
                async with gate:
                    await self._send(session, request, record, slo, start_s)
                if on_done is not None:
                    on_done(record)

            await asyncio.gather(*map(one, workload.requests, records))

    async def _send(
        self,
        session: aiohttp.ClientSession,
        request: RequestSpec,
        record: RequestRecord,
        slo: SloTarget,
        start_s: float,
    ) -> None:
        body: dict[str, Any] = {
            "model": self.model_id,
            "prompt": [self._first_token(record), *request.prompt_token_ids[1:]],
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self.options.extra_body,
        }
        targets = extra_args(request.slo or (slo if self.options.send_slo else None))
        if targets:
            body["vllm_xargs"] = {**body.get("vllm_xargs", {}), **targets}
        record.sent_s = time.perf_counter() - start_s
        try:
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    detail = (await response.text())[:300]
                    record.error = f"HTTP {response.status} {response.reason}: {detail}"
                    return
                async for event in _events(response.content):
                    _stamp(record, event, time.perf_counter() - start_s)
        except (
            aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError, RecursionError,
        ) as error:  # fmt: skip
            record.error = f"{type(error).__name__}: {error}"
            return
        if not record.error and record.num_output_tokens != request.output_tokens:
            record.error = (
                f"ended after {record.num_output_tokens} of {request.output_tokens} tokens"
            )
        record.completed = not record.error

    def _first_token(self, record: RequestRecord) -> int:
        offset = 2 * self._num_runs + (1 if record.req_id.startswith(_WARMUP) else 0)
        return FIRST_PLAIN_TOKEN + offset % _NUM_FIRST_TOKENS

    def _session(self) -> aiohttp.ClientSession:
        headers = dict(self.options.headers)
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers.setdefault("Authorization", f"Bearer {key}")
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.options.stall_timeout_s),
            trust_env=True,
        )

    async def _first_model(self) -> tuple[str, int | None]:
        """Name and context length of the model, once the server answers."""
        url = self.options.base_url + "/v1/models"
        deadline_s = time.perf_counter() + self.options.ready_timeout_s
        timeout = aiohttp.ClientTimeout(total=_READY_TIMEOUT_S)
        async with self._session() as session:
            while True:
                try:
                    async with session.get(url, timeout=timeout) as response:
                        response.raise_for_status()
                        models = _models(await response.json())
                    break
                except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
                    if time.perf_counter() >= deadline_s:
                        raise ConfigError(
                            f"'--backend openai' needs a server that answers {url} "
                            f"({type(error).__name__}: {error}); start one, or correct --base-url "
                            "or --host and --port."
                        ) from error
                    await asyncio.sleep(_READY_POLL_S)
        names = list(models)
        wanted = self.options.model or (names[0] if names else None)
        if wanted is None or wanted not in names:
            raise ConfigError(
                f"'--model' must be served at {self.options.base_url} (got {wanted!r}; "
                f"it serves {', '.join(names) or 'nothing'})."
            )
        return wanted, models[wanted]


def _models(document: Any) -> dict[str, int | None]:
    """Context lengths of the models that a server lists, by name.

    Raises:
        ValueError: It is no such list.
    """
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise ValueError(f"the answer must be an object with a list 'data' (got {shown(document)})")
    found = {}
    for one in data:
        if not isinstance(one, dict) or not isinstance(one.get("id"), str):
            raise ValueError(f"each of 'data' must be an object with an 'id' (got {shown(one)})")
        length = one.get("max_model_len")
        found[one["id"]] = length if isinstance(length, int) and length > 0 else None
    return found


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON payloads of a server-sent event stream, up to ``[DONE]``.

    Raises:
        ValueError: One is no JSON object, not UTF-8 or too long.
    """
    async for raw in content:
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if not isinstance(event, dict):
            raise ValueError(f"an event must be an object (got {shown(event)})")
        yield event


def _stamp(record: RequestRecord, event: Mapping[str, Any], now_s: float) -> None:
    """Stamp the tokens an event brought: by its running usage if given, else one.

    Raises:
        ValueError: Its usage does not count tokens.
    """
    if "error" in event:
        record.error = f"server: {event['error']}"
        return
    usage = event.get("usage") or {}
    if not isinstance(usage, dict):
        raise ValueError(f"'usage' must be an object (got {shown(usage)})")
    total, num_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    for count in (total, num_prompt):
        if count is not None and not (isinstance(count, int) and 0 <= count <= _MOST_TOKENS):
            raise ValueError(f"'usage' must count tokens (got {shown(count)})")
    if total is None:
        total = record.num_output_tokens + (1 if event.get("choices") else 0)
    record.token_times_s.extend([now_s] * (total - record.num_output_tokens))
    if num_prompt:
        record.num_prompt_tokens = num_prompt


def _warmup_record(request: RequestSpec) -> RequestRecord:
    return RequestRecord(_WARMUP + request.req_id, 0.0, len(request.prompt_token_ids))
