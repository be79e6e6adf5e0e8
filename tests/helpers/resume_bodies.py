"""Bodies of streamed requests, one for each thing that going on with a stream depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
#: Never in an answer by chance.
SECRET = "THE-SECRET"
_MESSAGES = [{"role": "user", "content": f"{SECRET}: größe 北?"}]
_USAGE = {"stream_options": {"include_usage": True}}
_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
#: Characters of the byte-level tokenizer that are printable ASCII.
ASCII = list(range(3, 3 + 94))
#: Its tokens that are bytes. A special one within a character, which no trained model would write,
#: makes a text that cannot be matched with its tokens.
BYTES = list(range(3, 3 + 256))


@dataclass(frozen=True)
class Body:
    """A request.

    Attributes:
        name: What is special about it.
        body: Its body, but for the model.
        path: Where it goes.
        may_fail: Whether the docs let its stream end with an error when its replica is lost.
    """

    name: str
    body: dict[str, Any]
    path: str = CHAT
    may_fail: bool = False

    @property
    def is_sampled(self) -> bool:
        """Whether it comes out otherwise each time."""
        return float(self.body.get("temperature", 1)) > 0 and self.body.get("seed") is None


def _chat(name: str, *, may_fail: bool = False, path: str = CHAT, **options: Any) -> Body:
    body = {"messages": _MESSAGES, "temperature": 0, "max_tokens": 24}
    given = {k: v for k, v in (body | options).items() if v is not ...}
    return Body(name, given, path, may_fail)


def _completion(name: str, *, may_fail: bool = False, **options: Any) -> Body:
    body = {"prompt": f"{SECRET} to be", "temperature": 0, "max_tokens": 24}
    given = {k: v for k, v in (body | options).items() if v is not ...}
    return Body(name, given, COMPLETIONS, may_fail)


#: `...` stands for an option that is not there.
BODIES = [
    _chat("chat", **_USAGE),
    _chat("chat without a limit", max_tokens=..., **_USAGE),
    _chat("chat, max_tokens null", max_tokens=None),
    _chat("chat, max_completion_tokens", max_tokens=..., max_completion_tokens=24),
    _chat("chat, numbers as strings", max_tokens="24", temperature="0", min_tokens="5", n="1"),
    _chat("chat, usage in each event", **_EACH),
    _chat("chat, query string", path=CHAT + "?api-version=1"),
    _chat("chat, plain text format", response_format={"type": "text"}),
    _chat("chat, token ids", return_token_ids=True, **_USAGE),
    _chat("chat, log probabilities", logprobs=True, top_logprobs=2, **_USAGE),
    _chat("sampled chat, two choices", temperature=1, n=2, may_fail=True, **_USAGE),
    _chat("chat, stop string", stop=["zzzz"]),
    _chat("chat, short stop string", stop=["a", "e"]),
    _chat("chat, echo", echo=True),
    _chat("chat, last message goes on", add_generation_prompt=False, continue_final_message=True,
          messages=[*_MESSAGES, {"role": "assistant", "content": "I say"}]),
    _chat("chat, allowed tokens", allowed_token_ids=ASCII),
    _chat("chat, bias", logit_bias={"50": 5, "90": 4}),
    _chat("chat, stream_interval 5", stream_interval=5),
    _chat("chat, repetition penalty", repetition_penalty=1.3),
    _chat("chat, frequency penalty", frequency_penalty=0.7),
    _chat("chat, ignore_eos", ignore_eos=True, skip_special_tokens=False),
    _chat("chat, tool that is not chosen", tool_choice="none", tools=[
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    ]),
    _chat("chat, seed", temperature=..., seed=7, **_USAGE),
    _chat("chat, three choices, seed", temperature=..., seed=7, n=3),
    _chat("sampled chat", temperature=..., may_fail=True, **_USAGE),
    _chat(
        "sampled chat without a limit", temperature=..., max_tokens=..., may_fail=True, **_USAGE
    ),
    _chat("sampled chat, token ids", temperature=1.0, return_token_ids=True, may_fail=True),
    _chat(
        "sampled chat, plain text format", temperature="1", response_format={"type": "text"},
        may_fail=True,
    ),
    _chat("sampled chat, stop string", temperature=1, stop=["zzzz"], may_fail=True),
    _chat("sampled chat, log probabilities", temperature=1, logprobs=True, may_fail=True),
    _completion("completion", **_USAGE),
    _completion("completion without a limit", max_tokens=...),
    _completion("completion, max_tokens null", max_tokens=None),
    _completion("completion, numbers as strings", max_tokens="24", temperature="0.0"),
    _completion("completion of ids", prompt=[10, 20, 30], return_token_ids=True, **_EACH),
    _completion("completion of a list of ids", prompt=[[10, 20, 30]]),
    _completion("completion of two prompts", prompt=["to be", "or not"], **_USAGE),
    _completion("completion, log probabilities", logprobs=2, **_USAGE),
    _completion("completion, log probabilities of ASCII", logprobs=1, allowed_token_ids=ASCII),
    _completion("completion, echo", echo=True),
    _completion("completion, echo and log probabilities", echo=True, logprobs=1),
    _completion("completion, no special tokens", add_special_tokens=False),
    _completion("completion, truncated prompt", truncate_prompt_tokens=4, **_USAGE),
    _completion("completion, presence penalty", presence_penalty=1.0),
    _completion("completion, stop tokens", stop_token_ids=[77, 78, 79], return_token_ids=True),
    _completion("completion, stream_interval 3", stream_interval=3, return_token_ids=True),
    _completion("completion, seed", temperature=..., seed=5),
    _completion("sampled completion", temperature=..., allowed_token_ids=BYTES, **_USAGE),
    _completion("sampled completion, log probabilities", temperature=1, logprobs=1, may_fail=True),
    _completion("sampled completions of two prompts", temperature=1, prompt=["to be", "or not"],
                may_fail=True),
]  # fmt: skip
