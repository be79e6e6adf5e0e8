"""What a client has received of a stream, read only when the stream has to go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sola_sched.serving.resuming import events

#: Text of a choice: of completions, and of a chat's delta.
TEXT_FIELDS = ("text", "content", "reasoning", "reasoning_content")
_MOST_PIECES = 1000
#: What reading an event raises that is not as vLLM writes them.
ODD_EVENT = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(slots=True)
class ChoiceSent:
    """What was sent of one choice.

    Attributes:
        token_ids: Of its output.
        finish_reason: None while it goes on.
        num_logprobs: Tokens, of prompt and output, with which log probabilities came.
        text_offsets: Where the text of each of these begins, and at last that of the next one;
            empty without any.
        has_tool_calls: Whether parts of a tool call were among it.
        has_all_ids: Whether no text has come without the ids of its tokens.
        num_told: Tokens whose text is all that was sent; None where that is not known, as an event
            of several tokens may end within a character.
        num_before: Tokens before the last event that had text.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_logprobs: int = 0
    text_offsets: list[int] = field(default_factory=list)
    has_tool_calls: bool = False
    has_all_ids: bool = True
    num_told: int | None = 0
    num_before: int = 0
    _pieces: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_text(self) -> bool:
        """Whether any text was sent."""
        return bool(self._pieces)

    @property
    def texts(self) -> dict[str, str]:
        """All text, by field."""
        return {name: "".join(pieces) for name, pieces in self._pieces.items()}

    def add(self, choice: Mapping[str, Any]) -> None:
        """One more part."""
        ids = choice.get("token_ids") or ()
        part = choice.get("delta", choice)
        has_text = False
        for name in TEXT_FIELDS:
            if text := part.get(name):
                if not isinstance(text, str):
                    raise TypeError(f"{name!r} must be a text (got {text!r:.80})")
                has_text = True
                pieces = self._pieces.setdefault(name, [])
                pieces.append(text)
                if len(pieces) > _MOST_PIECES:  # one text takes less room
                    pieces[:] = ["".join(pieces)]
        if has_text:
            self.num_before = len(self.token_ids)
            self.num_told = self.num_before + 1 if len(ids) == 1 else None
            self.has_all_ids &= bool(ids)
        self.token_ids += _numbers(ids)
        self.has_tool_calls |= bool(part.get("tool_calls"))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._add_logprobs(choice.get("logprobs") or {})

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        self.num_logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())
        if offsets := logprobs.get("text_offset"):
            after = offsets[-1] + len(logprobs["tokens"][-1])
            self.text_offsets[-1:] = [*offsets, after]

    def forget_after(self, num_tokens: int) -> None:
        """Take the tokens after so many for not sent; nothing of them was shown."""
        del self.token_ids[num_tokens:]
        self.num_told = num_tokens


@dataclass(slots=True)
class Transcript:
    """All that was sent of one stream.

    Attributes:
        head: `id`, `object`, `created` and `model` of its chunks.
        prompt_ids: The prompt as the engine had it; None where it was not told.
        choices: By index.
        has_usage: Whether the last part of it, the usage, was sent.
        is_readable: Whether all of it was as vLLM writes it.
    """

    head: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    choices: dict[int, ChoiceSent] = field(default_factory=dict)
    has_usage: bool = False
    is_readable: bool = True

    @classmethod
    def of(cls, sent: Iterable[bytes]) -> Transcript:
        """What these events say, with token ids where they have them."""
        transcript = cls()
        transcript.read(sent)
        return transcript

    def read(self, sent: Iterable[bytes]) -> None:
        """More events."""
        for event in sent:
            if (chunk := events.parse(event)) is not None:
                try:
                    self.add(chunk)
                except ODD_EVENT:
                    self.is_readable = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        """One more chunk."""
        if not self.head:
            names = ("id", "object", "created", "model")
            self.head = {name: chunk[name] for name in names if name in chunk}
        choices = chunk.get("choices") or ()
        self.has_usage |= not choices and bool(chunk.get("usage"))
        self._add_prompt(chunk)
        for choice in choices:
            self._add_prompt(choice)
            self.choices.setdefault(choice.get("index", 0), ChoiceSent()).add(choice)

    def _add_prompt(self, part: Mapping[str, Any]) -> None:
        if ids := part.get("prompt_token_ids"):
            self.prompt_ids = _numbers(ids)

    @property
    def num_tokens(self) -> int:
        """Output tokens that were sent, of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())


def _numbers(ids: Any) -> list[int]:
    """Token ids.

    Raises:
        TypeError: They are none.
    """
    if ids and not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        raise TypeError(f"token ids must be a list of numbers (got {ids!r:.80})")
    return ids or []
