"""The events of another replica's answer, made into those that go on with a stream."""

from __future__ import annotations

from typing import Any

from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.asked import Asked
from sola_sched.serving.resuming.transcript import ODD_EVENT, TEXT_FIELDS, ChoiceSent, Transcript


class DivergedError(Exception):
    """A stream that was repeated differs from what its client has."""


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
        try:
            rewritten = self.chunk(chunk)
        except ODD_EVENT as error:
            raise DivergedError(f"an event must be as vLLM writes them ({error})") from error
        return events.write(rewritten) if rewritten is not None else b""

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """What takes the place of a chunk; None for nothing."""
        raise NotImplementedError


class Continued(Rewrite):
    """A completion of the prompt and the output so far.

    Args:
        asked: The request.
        sent: What the client has.
        num_kept: Output tokens that were prompt; those after them come again and are left out.
    """

    def __init__(self, asked: Asked, sent: Transcript, num_kept: int) -> None:
        choice = sent.choices[0]
        self._asked, self._sent, self._num_kept = asked, sent, num_kept
        self._again = choice.token_ids[num_kept:]
        of_last = min(num_kept, len(choice.text_offsets) - 1)
        self._text_offset = choice.text_offsets[of_last] if choice.text_offsets else 0

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """See `Rewrite`."""
        choices = chunk.get("choices") or ()
        if choices:
            choice = self._choice(dict(choices[0]))
            if choice is None:
                return None
            chunk = {**chunk, **choice}
        if usage := chunk.get("usage"):
            usage["prompt_tokens"] -= self._num_kept
            usage["completion_tokens"] += self._num_kept
        return {**chunk, **self._sent.head}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        text = choice.pop("text", "")
        choice["prompt_token_ids"] = None
        ids = choice.get("token_ids") or []
        num_again = min(len(ids), len(self._again))
        _check_ids(ids, self._again)
        del self._again[:num_again]
        if num_again:
            choice["token_ids"] = ids[num_again:]
        if logprobs := choice.get("logprobs"):
            logprobs = _without_first(logprobs, num_again)
            offsets = logprobs.get("text_offset") or ()
            logprobs["text_offset"] = [self._text_offset + offset for offset in offsets]
            choice["logprobs"] = logprobs
        is_new = text or choice.get("finish_reason") or len(ids) > num_again or not num_again
        return chunk_of(self._asked, self._sent, choice, text) if is_new else None


class Replayed(Rewrite):
    """The same answer again.

    Drops as much text, and as many ids and log probabilities, as were sent, and checks that text
    and ids are the same.

    Args:
        sent: What the client has; it may grow meanwhile.
    """

    def __init__(self, sent: Transcript) -> None:
        self._head = sent.head
        self._finished = {index for index, each in sent.choices.items() if each.finish_reason}
        self._left = {
            (index, name): text
            for index, choice in sent.choices.items()
            for name, text in choice.texts.items()
        }
        self._ids = {index: list(choice.token_ids) for index, choice in sent.choices.items()}
        self._logprobs = {index: choice.num_logprobs for index, choice in sent.choices.items()}

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """See `Rewrite`."""
        chunk = {**chunk, **self._head, "prompt_token_ids": None}
        is_usage_alone = bool(chunk.get("usage")) and not chunk.get("choices")
        chunk["choices"] = [c for c in map(self._choice, chunk.get("choices") or ()) if c]
        return chunk if chunk["choices"] or is_usage_alone else None

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index = choice.get("index", 0)
        if index not in self._ids:
            return choice
        if index in self._finished:
            return None
        choice["prompt_token_ids"] = None
        part = choice.get("delta", choice)
        is_new = bool(choice.get("finish_reason") or part.get("tool_calls"))
        for name in TEXT_FIELDS:
            if part.get(name):
                part[name] = self._unsent(index, name, part[name])
                is_new |= bool(part[name])
        if ids := choice.get("token_ids"):
            left = self._ids[index]
            _check_ids(ids, left)
            choice["token_ids"] = ids[len(left) :]
            del left[: len(ids)]
            is_new |= bool(choice["token_ids"])
        if logprobs := choice.get("logprobs"):
            is_new |= self._without_sent(index, choice, logprobs)
        part.pop("role", None)
        if choice.get("finish_reason"):
            for (of, name), left_text in self._left.items():
                if of == index and left_text:
                    raise DivergedError(f"the {name} ended before {left_text!r:.80} was sent")
        return choice if is_new else None

    def _without_sent(self, index: int, choice: dict[str, Any], logprobs: dict[str, Any]) -> bool:
        """Leave out the log probabilities that were sent; whether there are others."""
        num = len(logprobs.get("tokens") or logprobs.get("content") or ())
        num_old = min(num, self._logprobs[index])
        self._logprobs[index] -= num_old
        choice["logprobs"] = _without_first(logprobs, num_old)
        return num > num_old

    def _unsent(self, index: int, name: str, text: str) -> str:
        left = self._left.get((index, name), "")
        num_old = min(len(left), len(text))
        if left[:num_old] != text[:num_old]:
            raise DivergedError(f"{text[:num_old]!r} came in place of {left[:num_old]!r}")
        self._left[index, name] = left[num_old:]
        return text[num_old:]


def _check_ids(ids: list[int], left: list[int]) -> None:
    for new, old in zip(ids, left, strict=False):
        if new != old:
            raise DivergedError(f"token {new} came in place of {old}")


def _without_first(logprobs: dict[str, Any], num: int) -> dict[str, Any]:
    return {n: each[num:] if isinstance(each, list) else each for n, each in logprobs.items()}


def chunk_of(
    asked: Asked, sent: Transcript, choice: dict[str, Any], text: str = ""
) -> dict[str, Any]:
    """A chunk of the stream's own kind, of a completion's choice."""
    if asked.is_chat:
        choice = {"index": 0, "delta": {"content": text}, **choice, "logprobs": None}
        choice.pop("prompt_token_ids", None)
    else:
        choice = {"index": 0, "text": text, "logprobs": None, **choice}
    return {**sent.head, "choices": [choice]}


def shows_all(decoded: str, choice: ChoiceSent, *, is_chat: bool) -> bool:
    """Whether the text that was sent of a choice is all that its tokens say.

    It is not where they end within a character, or where a parser holds text back that may be
    the beginning of a marker.

    Args:
        decoded: The text of the tokens, with that of special ones.
        choice: What was sent of it.
        is_chat: Whether a parser may have read it.
    """
    num_marks = sum(text.count(_UNREADABLE) for text in choice.texts.values())
    if decoded.endswith(_UNREADABLE) or decoded.count(_UNREADABLE) != num_marks:
        return False
    if not is_chat:
        return True
    content = choice.texts.get("content", "")
    before, tail, after = decoded.rpartition(content[-_TAIL:])
    if not tail or after:
        return False
    reasonings = [text for name, text in choice.texts.items() if name.startswith("reasoning")]
    if reasoning := "".join(reasonings).strip():
        before = before.rpartition(reasoning[-_TAIL:])[2]
    return len(content) > _TAIL or tail not in before


#: What stands for the bytes of a character that is not whole.
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
#: Characters at the end of a text that are compared; longer than any marker's beginning.
_TAIL = 32
