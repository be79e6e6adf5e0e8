"""What a streamed request asks for, as far as going on with its stream depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.serving.resuming.values import flag, number, whole

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
STREAM_PATHS = frozenset((COMPLETIONS, CHAT))

#: vLLM's default for completions; a chat's is the rest of the context, or the server's own.
_DEFAULT_MAX_TOKENS = 16
#: Whatever has one of these set cannot go on from token ids alone.
_CARRIES_STATE = (
    "bad_words", "best_of", "echo", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "prompt_embeds", "prompt_logprobs", "repetition_detection", "stop", "suffix",
    "thinking_token_budget", "use_beam_search", "watermarking",
)  # fmt: skip
#: These look back at the output, which a continuation takes for prompt.
_PENALTIES = ("frequency_penalty", "presence_penalty")


def without_query(path: str) -> str:
    """The path without what follows a question mark."""
    return path.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a stream.

    Attributes:
        path: With its query.
        body: As it was sent to the first replica.
        shows_ids: Whether the client itself is shown token ids.
    """

    path: str
    body: Mapping[str, Any]
    shows_ids: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat, else a completion."""
        return without_query(self.path) == CHAT

    @property
    def is_readable(self) -> bool:
        """Whether all that is asked here of the body is as vLLM takes it."""
        try:
            _ = self.num_choices, self.has_state, self.wants_usage, self.max_tokens
        except (AttributeError, TypeError, ValueError, RecursionError):
            return False
        return True

    @property
    def num_choices(self) -> int:
        """Answers that the stream has: several for each of several prompts."""
        prompt = self.body.get("prompt")
        num_prompts = 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        return num_prompts * (whole(self.body.get("n")) or 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the same request has the same answer again."""
        return number(self.body.get("temperature")) == 0

    @property
    def has_seed(self) -> bool:
        """Whether each token is drawn by its place in the output."""
        return self.body.get("seed") is not None

    @property
    def has_penalties(self) -> bool:
        """Whether a token's chance depends on which are output and which are prompt."""
        return any(number(self.body.get(name)) for name in _PENALTIES)

    @property
    def has_state(self) -> bool:
        """Whether the engine carries more along than token ids."""
        body = self.body
        if any(body.get(name) for name in _CARRIES_STATE) or _is_format(body):
            return True
        has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        return self.is_chat and (has_tools or self.wants_logprobs or not _has_text_only(body))

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities come with the tokens."""
        value = self.body.get("logprobs")
        return flag(value) if self.is_chat else value is not None

    @property
    def shows_each_token(self) -> bool:
        """Whether the client sees of each token more than its text."""
        return self.shows_ids or self.wants_logprobs

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the numbers of its tokens."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and flag(options.get("include_usage"))

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens; None where the server decides."""
        limit = self.body.get("max_tokens")
        if self.is_chat and self.body.get("max_completion_tokens") is not None:
            limit = self.body["max_completion_tokens"]
        if limit is None and not self.is_chat:
            return _DEFAULT_MAX_TOKENS
        return whole(limit)

    @property
    def min_tokens(self) -> int:
        """Least output tokens."""
        return whole(self.body.get("min_tokens")) or 0


def _is_format(body: Mapping[str, Any]) -> bool:
    """Whether the output has to follow a grammar; plain text is none."""
    form = body.get("response_format")
    if form and not (isinstance(form, dict) and form.get("type") == "text"):
        return True
    outputs = body.get("structured_outputs")
    if isinstance(outputs, dict):
        return any(value is not None and value is not False for value in outputs.values())
    return bool(outputs)


def _has_text_only(body: Mapping[str, Any]) -> bool:
    for message in body.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and part.get("type") != "text" for part in parts):
            return False
    return True
