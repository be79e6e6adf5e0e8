"""How a stream goes on at another replica after its own has gone: no token twice, none left out.

Either way the client keeps its connection and sees one stream, the one that would have been.

*Continue*: the prompt and the output so far, as token ids, are the prompt of a completion over the
rest. It costs a prefill. Greedy outputs are those of an uninterrupted run, as far as the engine's
prefill and decode agree on the likeliest token; sampled ones go on from what the client has. What
the gateway cannot know - where the text so far ends among the tokens, and how long the server lets
an answer become - the replica is asked first (`questions.py`).
*Replay*: the same request again, of which what was sent is dropped. For what an engine carries
along beside the tokens - stop strings, grammars, parsers, penalties, several choices - and only
where the output comes out the same again: at temperature 0, or with a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.asked import COMPLETIONS, Asked
from sola_sched.serving.resuming.rewrite import Continued, Replayed, Rewrite, chunk_of
from sola_sched.serving.resuming.transcript import ChoiceSent, Transcript

#: Of a chat's body, what means the same in that of a completion.
_SHARED = (
    "allowed_token_ids", "cache_salt", "ignore_eos", "include_stop_str_in_output", "logit_bias",
    "min_p", "model", "priority", "repetition_penalty", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop_token_ids", "stream", "stream_interval",
    "stream_options", "temperature", "top_k", "top_p", "user", "vllm_xargs",
)  # fmt: skip
#: Of a completion's body, what is of its prompt, which the ids have been made of already, and the
#: KV of that prompt that another engine has computed.
_OF_PROMPT = (
    "add_special_tokens", "ec_transfer_params", "kv_transfer_params", "truncate_prompt_tokens",
    "truncation_side",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Send `body` to `path`, and put the answer through `rewrite`.

    Attributes:
        num_kept: Output tokens that are prompt now; None for the whole request again.
    """

    path: str
    body: dict[str, Any]
    rewrite: Rewrite
    num_kept: int | None = None


@dataclass(frozen=True, slots=True)
class Ways:
    """How a stream can go on.

    Attributes:
        can_continue: Whether from its tokens, if a replica's answers allow it.
        can_replay: Whether by the same request again.
    """

    can_continue: bool
    can_replay: bool


def asks_for_ids(body: Mapping[str, Any]) -> bool:
    """Whether a stream's token ids are of use; with `echo` asking for them changes the text."""
    return not body.get("echo") and not body.get("prompt_embeds")


def ending(asked: Asked, sent: Transcript) -> list[bytes] | None:
    """The events that are missing where nothing but the end is; None where more is."""
    finished = [choice for choice in sent.choices.values() if choice.finish_reason]
    if not (sent.is_readable and asked.is_readable) or len(finished) < asked.num_choices:
        return None
    if not asked.wants_usage or sent.has_usage:
        return [events.DONE]
    has_several_prompts = isinstance(asked.body.get("prompt"), list) and asked.num_choices > 1
    has_all_ids = all(choice.has_all_ids for choice in finished)
    if sent.prompt_ids is None or has_several_prompts or not has_all_ids:
        return None
    num_prompt, num_output = len(sent.prompt_ids), sent.num_tokens
    usage = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
    return [events.write({**sent.head, "choices": [], "usage": usage}), events.DONE]


def ways(asked: Asked, sent: Transcript) -> Ways:
    """How the stream can go on after what was `sent`."""
    if not (sent.is_readable and asked.is_readable):
        return Ways(can_continue=False, can_replay=False)
    choices = sent.choices.values()
    has_output = any(
        choice.has_text or choice.has_tool_calls or (asked.shows_each_token and choice.token_ids)
        for choice in choices
    )
    is_repeatable = asked.is_greedy or asked.has_seed or not has_output
    return Ways(
        can_continue=(
            asked.num_choices == 1
            and sent.prompt_ids is not None
            and not (asked.has_state or asked.has_seed or asked.has_penalties)
            and _is_plain(asked, sent.choices.get(0, ChoiceSent()))
        ),
        can_replay=is_repeatable and not any(choice.has_tool_calls for choice in choices),
    )


def _is_plain(asked: Asked, choice: ChoiceSent) -> bool:
    """Whether what comes next is text as before; in the middle of reasoning it is a parser's."""
    is_text = choice.has_all_ids and not choice.has_tool_calls and not choice.finish_reason
    return is_text and choice.has_text and (not asked.is_chat or bool(choice.texts.get("content")))


def replay(asked: Asked, sent: Transcript) -> Plan:
    """The same request again."""
    if not any(choice.has_text for choice in sent.choices.values()) and not asked.shows_each_token:
        for choice in sent.choices.values():
            choice.forget_after(0)  # nobody has seen them, and others may come
    return Plan(asked.path, dict(asked.body), Replayed(sent))


def continuation(
    asked: Asked, sent: Transcript, num_told: int, max_tokens: int
) -> Plan | list[bytes] | None:
    """A completion of the prompt and the output so far; the events of the end if that is all.

    Args:
        num_told: Output tokens whose text is all that was sent.
        max_tokens: Most output tokens, of the whole answer.

    Returns:
        None where the tokens after those have been shown by their ids or log probabilities, and
        others would come in their place.
    """
    choice = sent.choices[0]
    if num_told < len(choice.token_ids):
        if not asked.shows_each_token:
            choice.forget_after(num_told)
        elif not asked.is_greedy:
            return None
    if max_tokens <= num_told:
        last: dict[str, Any] = {"finish_reason": "length", "stop_reason": None, "token_ids": []}
        chunk = chunk_of(asked, sent, last)
        sent.add(chunk)
        return [events.write(chunk), *(ending(asked, sent) or [events.DONE])]
    body = dict(asked.body)
    kept = {name: body[name] for name in _SHARED if name in body} if asked.is_chat else body
    rest = {name: value for name, value in kept.items() if name not in _OF_PROMPT}
    rest |= {
        "prompt": [*(sent.prompt_ids or ()), *choice.token_ids[:num_told]],
        "max_tokens": max_tokens - num_told,
        "min_tokens": max(0, asked.min_tokens - num_told),
        "return_token_ids": True,
    }
    _, mark, query = asked.path.partition("?")
    rewrite = Continued(asked, sent, num_told)
    return Plan(COMPLETIONS + mark + query, rest, rewrite, num_told)
