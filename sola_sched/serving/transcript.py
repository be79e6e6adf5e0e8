"""What a client has received of a stream, read only when the stream has to go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sola_sched.serving import events

#: Text of a choice: of completions, and of a chat's delta.
TEXT_FIELDS = ("text", "content", "reasoning", "reasoning_content")


@dataclass(slots=True)
class ChoiceSent:
    """What was sent of one choice.

    Attributes:
        token_ids: Of its output.
        texts: By field.
        finish_reason: None while it goes on.
        text_offset: Where the text of the next log probability begins; None without any.
        has_tool_calls: Whether parts of a tool call were among it.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    finish_reason: str | None = None
    text_offset: int | None = None
    has_tool_calls: bool = False

    def add(self, choice: Mapping[str, Any]) -> None:
        """One more part."""
        self.token_ids += choice.get("token_ids") or ()
        part = choice.get("delta", choice)
        for name in TEXT_FIELDS:
            if text := part.get(name):
                self.texts[name] = self.texts.get(name, "") + text
        self.has_tool_calls |= bool(part.get("tool_calls"))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        logprobs = choice.get("logprobs") or {}
        if offsets := logprobs.get("text_offset"):
            self.text_offset = offsets[-1] + len(logprobs["tokens"][-1])


@dataclass(slots=True)
class Transcript:
    """All that was sent of one stream.

    Attributes:
        head: `id`, `object`, `created` and `model` of its chunks.
        prompt_ids: The prompt as the engine had it; None where it was not told.
        choices: By index.
        has_usage: Whether the last part of it, the usage, was sent.
    """

    head: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    choices: dict[int, ChoiceSent] = field(default_factory=dict)
    has_usage: bool = False

    @classmethod
    def of(cls, sent: Iterable[bytes]) -> Transcript:
        """What these events say, with token ids where they have them."""
        transcript = cls()
        for event in sent:
            if (chunk := events.parse(event)) is not None:
                transcript.add(chunk)
        return transcript

    def add(self, chunk: Mapping[str, Any]) -> None:
        """One more chunk."""
        if not self.head:
            names = ("id", "object", "created", "model")
            self.head = {name: chunk[name] for name in names if name in chunk}
        choices = chunk.get("choices") or ()
        self.has_usage |= not choices and bool(chunk.get("usage"))
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        for choice in choices:
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.choices.setdefault(choice.get("index", 0), ChoiceSent()).add(choice)

    @property
    def num_tokens(self) -> int:
        """Output tokens that were sent, of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def has_output(self) -> bool:
        """Whether anything of a choice has been sent but its beginning."""
        return any(
            choice.token_ids or any(choice.texts.values()) or choice.has_tool_calls
            for choice in self.choices.values()
        )


def without_held_back(sent: list[bytes]) -> list[bytes]:
    """The events without those at the end whose tokens have shown no text yet.

    They are part of a character of several tokens. A server that is given a prompt with the first
    of them writes the prompt's own text out when the last one comes, so they are computed again.
    """
    end = len(sent)
    while end and _is_held_back(events.parse(sent[end - 1])):
        end -= 1
    return sent[:end]


def _is_held_back(chunk: dict[str, Any] | None) -> bool:
    choices = (chunk or {}).get("choices") or ()
    return bool(choices) and all(
        choice.get("token_ids")
        and not choice.get("finish_reason")
        and not choice.get("delta", choice).get("tool_calls")
        and not any(choice.get("delta", choice).get(name) for name in TEXT_FIELDS)
        for choice in choices
    )
