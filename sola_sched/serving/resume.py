"""How a stream goes on at another replica after its own has gone: no token twice, none left out.

Either way the client keeps its connection and sees one stream.

*Continue*: the prompt and the output so far, as token ids, are the prompt of a completion over the
rest. It costs a prefill. Greedy outputs are those of an uninterrupted run, as far as the engine's
prefill and decode agree on the likeliest token; sampled ones go on from what the client has.
*Replay*: the same request again, of which what was sent is dropped. For what an engine carries
along beside the tokens - stop strings, grammars, parsers, penalties, several choices - and only
where the output comes out the same again: at temperature 0, or with a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.serving import events
from sola_sched.serving.transcript import TEXT_FIELDS, ChoiceSent, Transcript

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
STREAM_PATHS = frozenset((COMPLETIONS, CHAT))

#: vLLM's default for completions; a chat's is the rest of the context.
_DEFAULT_MAX_TOKENS = 16
#: Whatever has one of these set cannot go on from token ids alone.
_CARRIES_STATE = (
    "bad_words", "best_of", "echo", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "prompt_embeds", "prompt_logprobs", "repetition_detection", "response_format",
    "stop", "structured_outputs", "suffix", "thinking_token_budget", "use_beam_search",
)  # fmt: skip
#: These look back at the output, which a continuation takes for prompt.
_PENALTIES = ("frequency_penalty", "presence_penalty")
#: Of a chat's body, what means the same in that of a completion.
_SHARED = (
    "allowed_token_ids", "cache_salt", "ignore_eos", "include_stop_str_in_output", "logit_bias",
    "min_p", "model", "priority", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids",
    "stream", "stream_interval", "stream_options", "temperature", "top_k", "top_p", "user",
    "vllm_xargs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Continuation:
    """Send `body` to `path`, and put the answer through `rewrite`; a replay is the whole again."""

    path: str
    body: dict[str, Any]
    rewrite: Rewrite
    is_replay: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """Nothing but the end is missing: these events."""

    events: list[bytes]


class DivergedError(Exception):
    """A replayed stream differs from what its client has."""


class Rewrite:
    """Turns the events of another answer into those that go on with a stream."""

    def feed(self, event: bytes) -> bytes:
        """What takes the place of an event; empty for nothing.

        Raises:
            DivergedError: It does not go on from what was sent.
        """
        chunk = events.parse(event)
        if chunk is None:
            return event
        rewritten = self.chunk(chunk)
        return events.write(rewritten) if rewritten is not None else b""

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """What takes the place of a chunk; None for nothing."""
        raise NotImplementedError


def asks_for_ids(body: Mapping[str, Any]) -> bool:
    """Whether a stream's token ids are of use; with `echo` asking for them changes the text."""
    return not body.get("echo") and not body.get("prompt_embeds")


def resume(path: str, body: Mapping[str, Any], sent: Transcript) -> Continuation | Ending | None:
    """How the stream goes on after what was `sent`; None where it cannot.

    Args:
        path: Of the request.
        body: As it was sent to the first replica.
        sent: What the client has.
    """
    choice = sent.choices.get(0, ChoiceSent())
    is_single = _is_single(body)
    if is_single and choice.finish_reason:
        return Ending(_tail(body, sent))
    is_repeatable = (
        body.get("temperature") == 0 or body.get("seed") is not None or not sent.has_output
    )
    is_exact = body.get("seed") is None and not any(body.get(name) for name in _PENALTIES)
    can_continue = is_single and sent.prompt_ids is not None and _is_plain(path, body, choice)
    if can_continue and (is_exact or not is_repeatable):
        return _continuation(path, body, sent, choice)
    if is_repeatable and not any(each.has_tool_calls for each in sent.choices.values()):
        return Continuation(path, dict(body), _Replayed(sent), is_replay=True)
    return None


def _is_single(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and body.get("n") in (None, 1)


def _is_plain(path: str, body: Mapping[str, Any], choice: ChoiceSent) -> bool:
    """Whether token ids are all that the rest depends on."""
    if any(body.get(name) for name in _CARRIES_STATE):
        return False
    if path == COMPLETIONS:
        return True
    has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    is_text = choice.texts.keys() == {"content"} and not choice.has_tool_calls
    return is_text and not has_tools and not body.get("logprobs") and _has_text_only(body)


def _has_text_only(body: Mapping[str, Any]) -> bool:
    for message in body.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and part.get("type") != "text" for part in parts):
            return False
    return True


def _max_tokens(path: str, body: Mapping[str, Any]) -> int | None:
    if path == COMPLETIONS:
        limit: int | None = body.get("max_tokens", _DEFAULT_MAX_TOKENS)
        return limit
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def _continuation(
    path: str, body: Mapping[str, Any], sent: Transcript, choice: ChoiceSent
) -> Continuation | Ending:
    num_done = len(choice.token_ids)
    limit = _max_tokens(path, body)
    if limit is not None and limit <= num_done:
        last = _chunk(path, sent, {"finish_reason": "length", "stop_reason": None}, "")
        return Ending([events.write(last), *_tail(body, sent)])
    kept = body if path == COMPLETIONS else {k: body[k] for k in _SHARED if k in body}
    rest = dict(kept)
    rest.pop("truncate_prompt_tokens", None)  # the prompt's ids are what was left of it
    rest |= {
        "prompt": [*(sent.prompt_ids or ()), *choice.token_ids],
        "max_tokens": None if limit is None else limit - num_done,
        "min_tokens": max(0, (body.get("min_tokens") or 0) - num_done),
        "return_token_ids": True,
    }
    return Continuation(COMPLETIONS, rest, _Continued(path, sent, choice))


class _Continued(Rewrite):
    def __init__(self, path: str, sent: Transcript, choice: ChoiceSent) -> None:
        self._path, self._sent = path, sent
        self._num_done = len(choice.token_ids)
        self._text_offset = choice.text_offset or 0

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        choices = chunk.get("choices") or ()
        if choices:
            chunk = {**chunk, **self._choice(dict(choices[0]))}
        if usage := chunk.get("usage"):
            usage["prompt_tokens"] -= self._num_done
            usage["completion_tokens"] += self._num_done
        return {**chunk, **self._sent.head}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        text = choice.pop("text", "")
        choice["prompt_token_ids"] = None
        if logprobs := choice.get("logprobs"):
            offsets = logprobs.get("text_offset") or ()
            logprobs["text_offset"] = [self._text_offset + offset for offset in offsets]
        return _chunk(self._path, self._sent, choice, text)


class _Replayed(Rewrite):
    """Drops as much text, and as many ids, as were sent; checks that they are the same."""

    def __init__(self, sent: Transcript) -> None:
        self._sent = sent
        self._left = {
            (index, name): text
            for index, choice in sent.choices.items()
            for name, text in choice.texts.items()
        }
        self._ids = {index: len(choice.token_ids) for index, choice in sent.choices.items()}

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        chunk = {**chunk, **self._sent.head, "prompt_token_ids": None}
        is_usage_alone = bool(chunk.get("usage")) and not chunk.get("choices")
        chunk["choices"] = [c for c in map(self._choice, chunk.get("choices") or ()) if c]
        return chunk if chunk["choices"] or is_usage_alone else None

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index = choice.get("index", 0)
        if index not in self._sent.choices:
            return choice
        if self._sent.choices[index].finish_reason:
            return None
        choice["prompt_token_ids"] = None
        part = choice.get("delta", choice)
        is_new = bool(choice.get("finish_reason") or part.get("tool_calls"))
        for name in TEXT_FIELDS:
            if part.get(name):
                part[name] = self._unsent(index, name, part[name])
                is_new |= bool(part[name])
        ids = choice.get("token_ids") or []
        num_old = min(len(ids), self._ids[index])
        self._ids[index] -= num_old
        choice["token_ids"] = ids[num_old:]
        if isinstance(of_tokens := choice.get("logprobs"), dict):
            choice["logprobs"] = {
                name: each[num_old:] if isinstance(each, list) else each
                for name, each in of_tokens.items()
            }
        part.pop("role", None)
        if choice.get("finish_reason"):
            for (of, name), left in self._left.items():
                if of == index and left:
                    raise DivergedError(f"the {name} ended before {left!r:.80}, which was sent")
        return choice if is_new or choice["token_ids"] else None

    def _unsent(self, index: int, name: str, text: str) -> str:
        left = self._left.get((index, name), "")
        num_old = min(len(left), len(text))
        if left[:num_old] != text[:num_old]:
            raise DivergedError(f"{text[:num_old]!r} came in place of {left[:num_old]!r}")
        self._left[index, name] = left[num_old:]
        return text[num_old:]


def _chunk(path: str, sent: Transcript, choice: dict[str, Any], text: str) -> dict[str, Any]:
    """A chunk of the stream's own kind, of a completion's choice."""
    if path == COMPLETIONS:
        choice = {"index": 0, "text": text, "logprobs": None, **choice}
    else:
        choice = {"index": 0, "delta": {"content": text}, **choice, "logprobs": None}
        choice.pop("prompt_token_ids", None)
    return {**sent.head, "choices": [choice]}


def _tail(body: Mapping[str, Any], sent: Transcript) -> list[bytes]:
    """What follows the last token: the usage, if it was asked for, and the end."""
    options = body.get("stream_options") or {}
    if not options.get("include_usage") or sent.has_usage or sent.prompt_ids is None:
        return [events.DONE]
    num_prompt, num_output = len(sent.prompt_ids), sent.num_tokens
    usage = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
    return [events.write({**sent.head, "choices": [], "usage": usage}), events.DONE]
