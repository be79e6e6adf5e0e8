"""One request as a gateway has it: what it asks for, and what a router is told of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sola_sched.cluster.view import RoutedRequest
from sola_sched.config.http_headers import OF_CONNECTION
from sola_sched.config.slo import REQUEST_KEYS, SloTarget, request_target
from sola_sched.errors import SloError
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.prediction.length import LengthPrediction
from sola_sched.serving.arrivals import ATTEMPT_HEADER
from sola_sched.serving.asked import STREAM_PATHS, without_query
from sola_sched.serving.resume import asks_for_ids
from sola_sched.serving.slo_headers import SLO_HEADERS, XARGS, with_slo_headers
from sola_sched.serving.values import flag, whole

#: Characters of a token, until something better is known.
_CHARS_PER_TOKEN = 4.0
#: Weight of one prompt in the running mean of that.
_WEIGHT = 0.05
#: Output of a request that does not limit it, or by more, tokens.
_MOST_TOKENS = 2**17
#: Beside those of the connection, what the gateway writes itself.
_NOT_PASSED_ON = OF_CONNECTION | SLO_HEADERS | {
    ATTEMPT_HEADER, "accept-encoding", "content-length", "expect", "host", "x-request-id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unread:
    """A prompt that nobody has read, of so many characters."""

    num_chars: int

    def __len__(self) -> int:
        """Its characters."""
        return self.num_chars


@dataclass(slots=True)
class Call:
    """One request to the gateway.

    Attributes:
        method, path: Of HTTP; the path with its query.
        headers: Those that go to the replica.
        data: The body as it came.
        body: The body as an object, with the headers' targets; None where it is none.
        request_id: Unique; replicas are told, so that answers keep their id.
        arrival_s: When it came, on the gateway's clock.
        wants_ids: Whether the client itself has asked for token ids.
    """

    method: str
    path: str
    headers: dict[str, str]
    data: bytes
    body: dict[str, Any] | None
    request_id: str
    arrival_s: float
    wants_ids: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether it can be resumed after it has begun."""
        is_path = without_query(self.path) in STREAM_PATHS
        return is_path and self.body is not None and flag(self.body.get("stream"))

    @classmethod
    def of(
        cls,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: bytes,
        *,
        request_id: str,
        arrival_s: float,
    ) -> Call:
        """Read a request.

        Raises:
            SloError: A header with a target is wrong.
        """
        body = _object(data) if method == "POST" else None
        if body is not None:
            body = with_slo_headers(body, headers)
        passed = {k: v for k, v in headers.items() if k.lower() not in _NOT_PASSED_ON}
        passed["X-Request-Id"] = request_id
        passed["Accept-Encoding"] = "identity"  # the gateway reads the events of a stream
        call = cls(method, path, passed, data, body, request_id, arrival_s)
        if body is not None and call.is_stream:
            call.wants_ids = flag(body.get("return_token_ids"))
            if asks_for_ids(body):
                body["return_token_ids"] = True
        return call


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return None
    return value if isinstance(value, dict) else None


@dataclass
class Lengths:
    """What a gateway learns of lengths: characters per token, and output tokens.

    Args:
        default_slo: Targets of requests that name none.
        classes: SLO classes by name; others are the replica's to judge.
    """

    default_slo: SloTarget = field(default_factory=SloTarget)
    classes: Mapping[str, SloTarget] = field(default_factory=dict)
    _histogram: LengthHistogram = field(default_factory=LengthHistogram)
    _chars_per_token: float = _CHARS_PER_TOKEN

    def routed(
        self, call: Call, name: str, num_resumed: int | None, avoid: frozenset[int]
    ) -> RoutedRequest:
        """What the router is told.

        Args:
            name: Unique to the attempt.
            num_resumed: Tokens that were sent already and are prompt now.
            avoid: Positions of replicas on which it has failed.
        """
        body = call.body or {}
        num_prompt = self.prompt_tokens(body)
        most = _most_tokens(body)
        if body.get("ignore_eos"):
            expected = float(most)
        else:
            of_class = np.array([self._histogram.class_of(num_prompt, most)])
            expected = float(
                self._histogram.remaining(of_class, np.array([0]), np.array([most]))[0]
            )
        done = num_resumed or 0
        return RoutedRequest(
            req_id=name,
            prompt_tokens=num_prompt + done,
            length=LengthPrediction.exactly(max(1.0, expected - done), "histogram"),
            slo=self._target(body),
            arrival_s=call.arrival_s,
            avoid=avoid,
        )

    def _target(self, body: Mapping[str, Any]) -> SloTarget:
        xargs = body.get(XARGS)
        own = {k: xargs[k] for k in REQUEST_KEYS if k in xargs} if isinstance(xargs, dict) else {}
        try:
            return request_target(own, self.default_slo, self.classes)
        except SloError:  # the replica refuses it, or knows the class
            return self.default_slo

    def prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """Tokens of a request's prompt, roughly; exact where it is token ids."""
        ids, chars = _ids_and_chars(body)
        return max(1, ids + round(chars / self._chars_per_token))

    def learn_prompt(self, body: Mapping[str, Any], num_tokens: int) -> None:
        """A replica has said how many tokens a prompt has."""
        ids, chars = _ids_and_chars(body)
        if chars and num_tokens > ids:
            new = chars / (num_tokens - ids)
            self._chars_per_token += _WEIGHT * (new - self._chars_per_token)

    def learn_output(self, body: Mapping[str, Any], num_tokens: int) -> None:
        """A request has ended with so many output tokens."""
        most = _most_tokens(body)
        if num_tokens >= 1:
            self._histogram.observe(
                self._histogram.class_of(self.prompt_tokens(body), most), num_tokens
            )


def _most_tokens(body: Mapping[str, Any]) -> int:
    most = whole(body.get("max_completion_tokens")) or whole(body.get("max_tokens"))
    return min(most, _MOST_TOKENS) if most and most > 0 else _MOST_TOKENS


def _ids_and_chars(body: Mapping[str, Any]) -> tuple[int, int]:
    """Token ids and characters in the prompt or the messages of a request."""
    if "messages" in body:
        return 0, _chars(body["messages"])
    prompt = body.get("prompt", body.get("input", ""))
    if not isinstance(prompt, list):
        return 0, _chars(prompt)
    flat = [each for part in prompt for each in (part if isinstance(part, list) else [part])]
    return sum(isinstance(each, int) for each in flat), sum(map(_chars, flat))


def _chars(value: Any) -> int:
    """Characters of a text, of a message, or of all parts of one."""
    if isinstance(value, str | Unread):
        return len(value)
    if isinstance(value, dict):
        return _chars(value.get("content", value.get("text")))
    return sum(map(_chars, value)) if isinstance(value, list) else 0
