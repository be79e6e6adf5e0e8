"""Token ids back to text, in the predictor's own process, with the served model's tokenizer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sola_sched.errors import EncoderError

Decode = Callable[[list[int]], str]

_BLOCK = 8
_MEMORY = 256
# A start that this share of the latest prompts has says nothing about one of them.
_SHARED = 0.2
_MIN_SHARED = 8


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Decode:
    """The decoding function of a tokenizer, special tokens left out.

    A folder with ``tokenizer.json`` is read directly; anything else goes through transformers,
    which takes some seconds more to import.

    Raises:
        EncoderError: There is no tokenizer of this name or folder, or its files are damaged.
    """
    path = Path(name) / "tokenizer.json"
    try:
        if path.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(path))
            return lambda ids: str(fast.decode(ids, skip_special_tokens=True))
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # both raise what they like, `tokenizers` plain `Exception`
        raise EncoderError(
            f"A text predictor needs the model's tokenizer (got {name!r}: {error}); pass "
            '--tokenizer to vLLM, or set "predictor": "histogram".'
        ) from error
    return lambda ids: str(slow.decode(ids, skip_special_tokens=True))


class SharedStart:
    """Finds the start that many prompts share, such as a system prompt, so that it can be left out.

    What every prompt says tells nothing about one of them, and it would fill the part of the prompt
    that is read. Starts are compared in blocks of 8 tokens over the last 256 prompts.
    """

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._latest: deque[list[int]] = deque()

    def length(self, token_ids: Sequence[int]) -> int:
        """Tokens at the start of this prompt that at least a fifth of the latest ones share.

        Takes the prompt in as one of them.
        """
        starts = []
        value = 0
        for end in range(_BLOCK, min(len(token_ids), 24 * _BLOCK) + 1, _BLOCK):
            value = hash((value, *token_ids[end - _BLOCK : end]))
            starts.append(value)
        self._latest.append(starts)
        self._seen.update(starts)
        if len(self._latest) > _MEMORY:
            for old in self._latest.popleft():
                self._seen[old] -= 1
                if not self._seen[old]:
                    del self._seen[old]
        least = max(_MIN_SHARED, _SHARED * len(self._latest))
        shared = 0
        for start in starts:
            if self._seen[start] < least:
                break
            shared += _BLOCK
        # A prompt that is all shared start (a repeated question) is kept whole.
        return shared if shared < len(token_ids) - _BLOCK else 0


def readable(
    decode: Decode, shared: SharedStart, num_tokens: int, token_ids: list[int]
) -> tuple[str, int]:
    """Text of a prompt without its shared start, and the characters of the whole of it.

    Args:
        decode: From ``load_tokenizer``.
        shared: What other prompts started with.
        num_tokens: Tokens of the whole prompt.
        token_ids: The prompt, or as many tokens from its start as from its end.
    """
    skip = shared.length(token_ids)
    if len(token_ids) == num_tokens:
        text = decode(token_ids[skip:])
        return text, len(text)
    half = len(token_ids) // 2
    skip = min(skip, half)
    head, tail = decode(token_ids[skip:half]), decode(token_ids[half:])
    text = f"{head} {tail}" if head else tail
    per_token = len(text) / max(1, len(token_ids) - skip)
    return text, round(per_token * (num_tokens - skip))
