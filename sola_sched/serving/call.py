"""One request as a gateway has it: what it asks for, and what a router is told of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
from multidict import CIMultiDict, MultiMapping

from sola_sched.cluster.view import RoutedRequest
from sola_sched.config.slo import TARGET_KEYS, SloTarget, request_target
from sola_sched.errors import SloError
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.prediction.length import LengthPrediction
from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.form import is_form, value_of, with_value
from sola_sched.proxy.headers import FORWARDED_FOR, forwarded_for, passed_on
from sola_sched.proxy.json_object import LONGEST_VALUE, JsonObject, inner, replaced
from sola_sched.proxy.owners import of_response
from sola_sched.proxy.paths import RESPONSES, Passage
from sola_sched.serving.arrivals import ATTEMPT_HEADER
from sola_sched.serving.resuming.asked import STREAM_PATHS, without_query
from sola_sched.serving.resuming.plans import asks_for_ids
from sola_sched.serving.resuming.values import flag, whole
from sola_sched.serving.slo_headers import (
    GENERATE,
    SAMPLING,
    SLO_HEADERS,
    XARGS,
    ClientRules,
    of_client,
    with_xargs,
    xargs_of,
)

#: Characters of a token, until something better is known.
_CHARS_PER_TOKEN = 4.0
#: Tokens of a prompt, until something better is known.
_PROMPT_TOKENS = 1000.0
#: Weight of one prompt in the running means of its characters and its tokens. They are means of
#: both, and not of their quotient, in which short prompts would weigh most: these are mostly what a
#: chat's template adds, and it is for long ones that a guess matters.
_WEIGHT = 0.05
#: Output of a request that does not limit it, or by more, tokens.
_MOST_TOKENS = 2**17
#: Beside those of the connection, what the gateway writes itself.
_NOT_PASSED_ON = SLO_HEADERS | {
    ATTEMPT_HEADER, "accept-encoding", "content-encoding", "content-length", "expect", "host",
    "x-forwarded-for", "x-request-id",
}  # fmt: skip
_REQUEST_ID = "X-Request-Id"
#: Characters of a client's name for a request: vLLM writes it into each event of a stream.
_LONGEST_ID = 128
_SESSION_HEADER = "X-Session-ID"
#: Where a body has its prompt, the first that there is.
_PROMPTS = ("messages", "prompt", "input", "token_ids")
_ALL_BUT_CLOCK = ClientRules()


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
        is_repeatable: Whether it may be sent again after it has reached a replica.
        stored_id: The stored response that it is about, or goes on from.
        num_ids, num_chars: Token ids and characters of its prompt.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    data: bytes
    body: Mapping[str, Any] | None
    request_id: str
    arrival_s: float
    wants_ids: bool = False
    is_repeatable: bool = True
    stored_id: str | None = None
    num_ids: int = 0
    num_chars: int = 0

    @property
    def is_stream(self) -> bool:
        """Whether it can be resumed after it has begun."""
        is_path = without_query(self.path) in STREAM_PATHS
        return is_path and self.body is not None and flag(self.body.get("stream"))

    @property
    def may_store(self) -> bool:
        """Whether the replica that answers keeps the answer for later."""
        return self.method == "POST" and without_query(self.path) == RESPONSES

    @property
    def owner_key(self) -> str | None:
        """What the replica has that this request has to go to; None where any will do."""
        if self.stored_id is not None:
            return of_response(self.stored_id)
        own = (self.body or {}).get("session_id")
        session = own or self.headers.get(_SESSION_HEADER) or self.xargs.get("session_id")
        return f"session {session}" if session else None

    @property
    def xargs(self) -> dict[str, Any]:
        """Its free arguments."""
        return xargs_of(self.body or {}, without_query(self.path))

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What limits its output."""
        body = self.body or {}
        found = inner(body, SAMPLING) if without_query(self.path) == GENERATE else body
        return found if isinstance(found, Mapping) else {}

    @classmethod
    def of(
        cls,
        method: str,
        path: str,
        headers: MultiMapping[str],
        data: bytes,
        *,
        request_id: str,
        arrival_s: float,
        peer: str | None = None,
        passage: Passage | None = None,
        rules: ClientRules = _ALL_BUT_CLOCK,
    ) -> Call:
        """Read a request.

        Args:
            peer: Address that it has come from.
            passage: Its path, as it passes.
            rules: What its client may say.

        Raises:
            SloError: A header with a target is wrong.
            RefusedError: The body is not what its path takes.
        """
        passed = passed_on(headers, _NOT_PASSED_ON)
        if forwarded := forwarded_for(headers, peer):
            passed[FORWARDED_FOR] = forwarded
        passed[_REQUEST_ID] = request_id
        passed["Accept-Encoding"] = "identity"  # the gateway reads the events of a stream
        call = cls(method, path, passed, data, None, request_id, arrival_s)
        takes_form = passage is not None and passage.takes_form
        if passage is not None:
            call.is_repeatable, call.stored_id = passage.is_repeatable, passage.response_id
        if method == "POST" and data:
            try:
                if takes_form and is_form(headers):
                    call._read_form(headers, rules)
                else:
                    call._read(JsonObject(data), headers, rules)
            except (ValueError, RecursionError) as error:
                if isinstance(error, SloError):
                    raise
                raise RefusedError(
                    HTTPStatus.BAD_REQUEST,
                    f"the body must be a JSON object in UTF-8{' or a form' * takes_form} "
                    f"(got: {error}).",
                ) from error
        return call

    def _read_form(self, headers: Mapping[str, str], rules: ClientRules) -> None:
        """Take in a body that is a form, of which only the free arguments are looked at.

        Raises:
            ValueError, RecursionError: It is none, or they are no right JSON.
        """
        kind = headers["Content-Type"]
        text = value_of(self.data, kind, XARGS)
        if text is not None and len(text) > LONGEST_VALUE:
            raise ValueError(f"{XARGS!r} is longer than {LONGEST_VALUE} bytes")
        own = xargs_of({XARGS: None if text is None else json.loads(text.decode())}, "")
        if (xargs := of_client(own, headers, rules)) is not None:
            self.data = with_value(self.data, kind, XARGS, json.dumps(xargs).encode())

    def _read(
        self, body: Mapping[str, Any], headers: Mapping[str, str], rules: ClientRules
    ) -> None:
        """Take in the body.

        Raises:
            ValueError, RecursionError: It is not right JSON throughout.
        """
        self.headers.setdefault("Content-Type", "application/json")
        path = without_query(self.path)
        if (xargs := of_client(xargs_of(body, path), headers, rules)) is not None:
            body = with_xargs(body, path, xargs)
        self.body = body
        self.num_ids, self.num_chars = ids_and_chars(body)
        if self.may_store:
            previous = body.get("previous_response_id")
            self.stored_id = previous if isinstance(previous, str) else self.stored_id
            self.is_repeatable = not flag(body.get("background"))
        if self.is_stream:
            self.wants_ids = flag(body.get("return_token_ids"))
            if asks_for_ids(body):
                self.body = replaced(body, return_token_ids=True)


def request_id_of(headers: Mapping[str, str]) -> str:
    """What a client calls its request, or a new name."""
    name = headers.get(_REQUEST_ID, "")
    return name if 0 < len(name) <= _LONGEST_ID else uuid.uuid4().hex


@dataclass
class Lengths:
    """What a gateway learns of lengths: characters per token, and output tokens."""

    _histogram: LengthHistogram = field(default_factory=LengthHistogram)
    _chars: float = _CHARS_PER_TOKEN * _PROMPT_TOKENS
    _tokens: float = _PROMPT_TOKENS

    def routed(
        self, call: Call, name: str, num_resumed: int | None, avoid: frozenset[int]
    ) -> RoutedRequest:
        """What the router is told.

        Args:
            name: Unique to the attempt.
            num_resumed: Tokens that were sent already and are prompt now.
            avoid: Positions of replicas on which it has failed.
        """
        num_prompt, sampling = self.prompt_tokens(call), call.sampling
        most = _most_tokens(sampling)
        if sampling.get("ignore_eos"):
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
            slo=_target(call),
            arrival_s=call.arrival_s,
            avoid=avoid,
        )

    def prompt_tokens(self, call: Call) -> int:
        """Tokens of a request's prompt, roughly; exact where it is token ids."""
        return max(1, call.num_ids + round(call.num_chars * self._tokens / self._chars))

    def learn_prompt(self, call: Call, num_tokens: int) -> None:
        """A replica has said how many tokens a prompt has.

        Nothing is learned where it goes on from a stored response: the request has only a part of
        the prompt's text.
        """
        if call.stored_id is None and call.num_chars and num_tokens > call.num_ids:
            self._chars += _WEIGHT * (call.num_chars - self._chars)
            self._tokens += _WEIGHT * (num_tokens - call.num_ids - self._tokens)

    def learn_output(self, call: Call, num_tokens: int) -> None:
        """A request has ended with so many output tokens."""
        most = _most_tokens(call.sampling)
        if num_tokens >= 1:
            self._histogram.observe(
                self._histogram.class_of(self.prompt_tokens(call), most), num_tokens
            )


def _target(call: Call) -> SloTarget:
    """The targets that a request names itself; its class and the defaults are the servers'."""
    try:
        return request_target(
            {key: value for key, value in call.xargs.items() if key in TARGET_KEYS}, SloTarget(), {}
        )
    except SloError:  # the replica refuses it
        return SloTarget()


def _most_tokens(body: Mapping[str, Any]) -> int:
    most = whole(body.get("max_completion_tokens")) or whole(body.get("max_tokens"))
    return min(most, _MOST_TOKENS) if most and most > 0 else _MOST_TOKENS


def ids_and_chars(body: Mapping[str, Any]) -> tuple[int, int]:
    """Token ids and characters in the prompt or the messages of a request."""
    name = next((each for each in _PROMPTS if each in body), None)
    if name is None:
        return 0, 0
    text = body.text(name) if isinstance(body, JsonObject) else None
    if text is not None:  # ids alone have no quotation marks
        return (0, len(text)) if b'"' in text else (text.count(b",") + 1, 0)
    prompt = body[name]
    if name == "messages" or not isinstance(prompt, list):
        return 0, _chars(prompt)
    flat = [each for part in prompt for each in (part if isinstance(part, list) else [part])]
    return sum(isinstance(each, int) for each in flat), sum(map(_chars, flat))


def _chars(value: Any) -> int:
    """Characters of a text, of a message, or of all parts of one, however deep."""
    num_chars, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            num_chars += len(one)
        elif isinstance(one, dict):
            left.append(one.get("content", one.get("text")))
        elif isinstance(one, list):
            left += one
    return num_chars
