"""What a log of requests calls its columns: one list for all tools that read such logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS = (
    "prompt_tokens", "ContextTokens", "Request tokens", "input_length", "num_prefill_tokens",
    "num_prompt_tokens",
)  # fmt: skip
OUTPUT_TOKENS = (
    "output_tokens", "completion_tokens", "response_tokens", "GeneratedTokens", "Response tokens",
    "output_length", "num_decode_tokens", "num_output_tokens", "reference_tokens",
)  # fmt: skip
PROMPT_TEXT = ("prompt",)
OUTPUT_TEXT = ("response", "completion")


def first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of these columns that says something; None if none does."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row whose counts and messages are where OpenAI's API has them, with these at the top."""
    found = dict(row)
    usage, messages = row.get("usage"), row.get("messages")
    if isinstance(usage, Mapping):
        found |= {k: v for k, v in usage.items() if k in (*PROMPT_TOKENS, *OUTPUT_TOKENS)}
    if isinstance(messages, list) and first(row, PROMPT_TEXT) is None:
        texts = (text for each in messages for text in _texts(each))
        found["prompt"] = "\n\n".join(texts)
    return found


def _texts(message: Any) -> list[str]:
    """What a message says: a text, or the texts among its parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]
