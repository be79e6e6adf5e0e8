"""Requests of the virtual engine: what is asked, and what happened."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Token that ends an output early; prompts and other outputs never contain it.
EOS_TOKEN_ID = 0
_NUM_RESERVED_TOKENS = 1


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """One request of a workload.

    Attributes:
        req_id: Unique name.
        arrival_s: Arrival on the virtual clock, seconds, >= 0.
        output_len: Tokens the model generates, >= 1.
        prompt_len: Prompt tokens; the engine makes up a prompt that no other request shares.
        prompt_token_ids: The prompt itself, instead of `prompt_len`; use it for shared prefixes.
        max_tokens: Output limit the scheduler sees, >= `output_len`. None forces the length:
            the limit is `output_len` and no EOS is sampled. Otherwise the model samples EOS as
            token number `output_len`, so the limit does not give the length away.
        extra_args: Free per-request arguments (`SamplingParams.extra_args`).
        priority: vLLM's priority; smaller is more urgent.
        abort_s: When the client gives up, seconds on the virtual clock; None never.
    """

    req_id: str
    arrival_s: float
    output_len: int
    prompt_len: int | None = None
    prompt_token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    extra_args: Mapping[str, Any] | None = None
    priority: int = 0
    abort_s: float | None = None

    def __post_init__(self) -> None:
        if (self.prompt_len is None) == (self.prompt_token_ids is None):
            raise ValueError(
                f"request {self.req_id!r} must have one of 'prompt_len' and 'prompt_token_ids'."
            )
        if self.num_prompt_tokens < 1:
            raise ValueError(
                f"request {self.req_id!r} must have >= 1 prompt token "
                f"(got {self.num_prompt_tokens})."
            )
        if self.output_len < 1:
            raise ValueError(
                f"'output_len' of request {self.req_id!r} must be >= 1 (got {self.output_len})."
            )
        if self.max_tokens is not None and self.max_tokens < self.output_len:
            raise ValueError(
                f"'max_tokens' of request {self.req_id!r} must be >= output_len "
                f"{self.output_len} (got {self.max_tokens})."
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        return self.prompt_len or 0

    @property
    def ends_with_eos(self) -> bool:
        """True when the model decides the length, not the limit."""
        return self.max_tokens is not None

    def make_prompt(self, vocab_size: int) -> list[int]:
        """The prompt's token ids; made up from `req_id` when only the length is given."""
        if self.prompt_token_ids is not None:
            return list(self.prompt_token_ids)
        seed = zlib.crc32(self.req_id.encode())
        span = vocab_size - _NUM_RESERVED_TOKENS
        # 32 bits of the name open the prompt, so that no first block equals another's.
        head = [seed % 256, (seed >> 8) % 256, (seed >> 16) % 256, seed >> 24]
        tokens = [*head, *range(seed % span, seed % span + self.num_prompt_tokens)]
        return [_NUM_RESERVED_TOKENS + t % span for t in tokens[: self.num_prompt_tokens]]

    def output_token(self, position: int, vocab_size: int) -> int:
        """The token the model samples at output `position` (0 is the first)."""
        if self.ends_with_eos and position == self.output_len - 1:
            return EOS_TOKEN_ID
        seed = zlib.crc32(self.req_id.encode())
        return _NUM_RESERVED_TOKENS + (seed + position) % (vocab_size - _NUM_RESERVED_TOKENS)


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request; times in seconds on the virtual clock.

    Attributes:
        req_id: Name of the request.
        arrival_s: Its arrival.
        num_prompt_tokens: Length of its prompt.
        scheduled_s: Start of the first step that worked on it; None if there was none.
        first_token_s: Delivery of the first output token; None if there was none.
        last_token_s: Delivery of the last one so far.
        num_output_tokens: Output tokens delivered.
        token_times_s: Delivery of each of them.
        num_preemptions: Times it lost its KV.
        finish_reason: ``stop`` (EOS), ``length``, ``abort``, ``error`` or None while it runs.
        finished_s: When it ended.
    """

    req_id: str
    arrival_s: float
    num_prompt_tokens: int
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: str | None = None
    finished_s: float | None = None

    @property
    def is_finished(self) -> bool:
        """True when the whole output was delivered."""
        return self.finish_reason in ("stop", "length")

    @property
    def is_aborted(self) -> bool:
        """True when the client gave up first."""
        return self.finish_reason == "abort"
