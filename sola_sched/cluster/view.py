"""What a router knows of the instances and of a request, and what it answers.

One `InstanceView` is the last report of one engine plus what was sent to it since. Reports are old
when they arrive (0.1 to 0.5 s with Ray Serve), so a view says how old it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ReportError
from sola_sched.prediction.length import LengthPrediction

FloatArray = NDArray[np.float64]
Kept = TypeVar("Kept")

_PER_WAITING = ("waiting_tokens", "waiting_outputs")
_PER_RUNNING = ("running_ctx", "running_prefill", "running_outputs", "running_left",
                "running_bank_s", "running_lost")  # fmt: skip
_BANK = "running_bank_s"
_COUNTS = ("kv_capacity_tokens", "kv_used_tokens", "max_num_seqs", "max_num_batched_tokens",
           "max_model_len", "num_gpus", "num_unreported", "num_waiting_lost")  # fmt: skip
#: A count beyond this is nonsense.
_MOST = 2**40
#: A clock that runs ahead of the router's by no more than this is no nonsense, seconds.
_CLOCK_SLACK_S = 1.0


def _none() -> FloatArray:
    return np.empty(0)


class StepModel(Protocol):
    """How long an instance's steps take; `sola_sched.cost.model.CostModel` is one."""

    def prefill_s(self, new_tokens: Any) -> Any:
        """Seconds of steps with one prompt chunk each, elementwise; the constant included."""

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """Seconds of a decode step of so many requests with that much KV in all, elementwise."""


@dataclass(frozen=True, eq=False)
class InstanceView:
    """What is known of one instance. All arrays are float64 and belong to the view.

    Attributes:
        model: Its step times.
        kv_capacity_tokens: Tokens of KV that it has memory for.
        max_num_seqs: Requests that it runs at once.
        max_num_batched_tokens: Tokens of one step.
        max_model_len: Longest prompt + output, tokens.
        num_gpus: GPUs that share each step.
        reported_s: When the engine was as described, on the router's clock.
        kv_used_tokens: Tokens of KV in use.
        waiting_tokens: Prompt tokens of each waiting request [w], in order of arrival; with the
            output that a preempted one has to compute again.
        waiting_outputs: Output tokens expected of each of them [w].
        running_ctx: Tokens of KV of each running request [r].
        running_prefill: Prompt tokens that it has yet to compute, or that a step under way computes
            [r]; 0 for a decode.
        running_outputs: Tokens that it has generated [r].
        running_left: Tokens that it is expected to generate yet [r].
        running_bank_s: Seconds by which it is ahead of its TPOT target [r], negative when behind,
            inf without a target: target x outputs less the time since the first token.
        running_lost: 1.0 where a target cannot be met any more [r], else 0.0.
        num_waiting_lost: Waiting requests that have missed their TTFT target, the first in the
            order of arrival.
        serves_lost_last: Whether these wait until nobody on time does, and prompts while decodes
            need the time, as with `policy=attain`; else they are in the way of those behind them.
        num_unreported: Of the waiting requests, those at the end that were sent after the report.
        is_alive: False for one that is known to be gone.
    """

    model: StepModel
    kv_capacity_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_gpus: int = 1
    reported_s: float = 0.0
    kv_used_tokens: int = 0
    waiting_tokens: FloatArray = field(default_factory=_none)
    waiting_outputs: FloatArray = field(default_factory=_none)
    running_ctx: FloatArray = field(default_factory=_none)
    running_prefill: FloatArray = field(default_factory=_none)
    running_outputs: FloatArray = field(default_factory=_none)
    running_left: FloatArray = field(default_factory=_none)
    running_bank_s: FloatArray = field(default_factory=_none)
    running_lost: FloatArray = field(default_factory=_none)
    num_waiting_lost: int = 0
    serves_lost_last: bool = False
    num_unreported: int = 0
    is_alive: bool = True

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, those sent since the report included."""
        return len(self.waiting_tokens)

    @property
    def num_running(self) -> int:
        """Requests that held a slot when the report was made."""
        return len(self.running_ctx)

    @property
    def num_requests(self) -> int:
        """Requests on the instance: the length of its queue in the sense of JSQ."""
        return len(self.waiting_tokens) + len(self.running_ctx)

    @property
    def num_lost(self) -> int:
        """Requests on the instance that cannot attain any more."""
        return int(self.running_lost.sum()) + self.num_waiting_lost

    @property
    def num_free_slots(self) -> int:
        """Slots that no running request holds."""
        return max(0, self.max_num_seqs - len(self.running_ctx))

    @cached_property
    def bank_s(self) -> float:
        """The smallest bank of those that can still attain, seconds; inf without any decode."""
        on_course = (self.running_lost == 0.0) & (self.running_outputs > 0.0)
        return float(self.running_bank_s[on_course].min(initial=math.inf))

    @cached_property
    def waiting_ahead(self) -> FloatArray:
        """`waiting_tokens` with 0 for those that a new request does not wait for [w]."""
        if not (self.serves_lost_last and self.num_waiting_lost):
            return self.waiting_tokens
        ahead = self.waiting_tokens.copy()
        ahead[: self.num_waiting_lost] = 0.0
        return ahead

    @cached_property
    def kv_expected_tokens(self) -> float:
        """KV of all its requests at their expected ends, tokens; may exceed the capacity."""
        running = self.running_ctx + self.running_prefill + self.running_left
        return float(running.sum() + self.waiting_tokens.sum() + self.waiting_outputs.sum())

    @cached_property
    def held_tokens(self) -> float:
        """KV of all its requests with their prompts computed, tokens."""
        running = float(self.running_ctx.sum() + self.running_prefill.sum())
        return running + float(self.waiting_tokens.sum())

    def fits(self, num_tokens: float) -> bool:
        """True if one request of so many tokens, prompt and output, fits when it is alone."""
        return num_tokens <= min(self.max_model_len, self.kv_capacity_tokens)

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What is computed of this view once and ends with it.

        Args:
            key: Whose it is; whatever else it is computed of.
            make: Computes it.
        """
        values = self.__dict__.setdefault("_kept", {})
        if key not in values:
            values[key] = make()
        found: Kept = values[key]
        return found

    def but(self, **changes: Any) -> InstanceView:
        """`dataclasses.replace`, without its cost: a report and a request sent make one each."""
        view = object.__new__(InstanceView)
        own = self.__dict__
        view.__dict__.update({name: own[name] for name in self.__dataclass_fields__}, **changes)
        return view

    def with_requests(self, requests: Collection[RoutedRequest]) -> InstanceView:
        """The view after these requests were sent to the instance."""
        prompts = [request.prompt_tokens for request in requests]
        outputs = [request.length.mean for request in requests]
        return self.but(
            waiting_tokens=np.concatenate((self.waiting_tokens, prompts)),
            waiting_outputs=np.concatenate((self.waiting_outputs, outputs)),
            num_unreported=self.num_unreported + len(prompts),
        )

    def check(self, now_s: float) -> None:
        """Refuse a report that cannot be true.

        Raises:
            ReportError: A count is negative or no whole number, a value is NaN, arrays of the same
                requests differ in length, or the report is of the future.
        """
        for name in _COUNTS:
            value, lowest = getattr(self, name), _lowest(name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_whole and lowest <= value <= _MOST):
                raise ReportError(
                    f"'{name}' must be a whole number in [{lowest}, {_MOST}] (got {value!r:.40})."
                )
        if not isinstance(self.serves_lost_last, bool):
            raise ReportError(
                f"'serves_lost_last' must be true or false (got {self.serves_lost_last!r:.40})."
            )
        if not (math.isfinite(self.reported_s) and self.reported_s <= now_s + _CLOCK_SLACK_S):
            raise ReportError(
                f"'reported_s' must not be in the future (got {self.reported_s!r} at {now_s:g})."
            )
        _check_rows(self, _PER_WAITING)
        _check_rows(self, _PER_RUNNING)
        for name, value, most in (
            ("num_running", self.num_running, self.max_num_seqs),
            ("kv_used_tokens", self.kv_used_tokens, self.kv_capacity_tokens),
            ("num_waiting_lost", self.num_waiting_lost, self.num_waiting),
        ):
            if not 0 <= value <= most:
                raise ReportError(f"'{name}' must be in [0, {most}] (got {value}).")


@dataclass(frozen=True, eq=False)
class RoutedRequest:
    """What a router knows of a request.

    Attributes:
        req_id: Unique name.
        prompt_tokens: Length of the prompt; for one that is resumed elsewhere with the tokens that
            it had generated.
        length: What is predicted of its output.
        slo: Its targets.
        arrival_s: When it came, on the router's clock: TTFT counts from here.
        avoid: Positions of instances on which it has failed.
    """

    req_id: str
    prompt_tokens: int
    length: LengthPrediction
    slo: SloTarget
    arrival_s: float
    avoid: frozenset[int] = frozenset()

    @property
    def peak_tokens(self) -> float:
        """KV of the request at its expected end, tokens."""
        return self.prompt_tokens + self.length.mean


Views = Sequence[InstanceView]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A router's answer when no instance should get the request.

    Attributes:
        reason: A sentence.
        is_temporary: Asking again a little later may help: hold the request instead of failing it.
    """

    reason: str
    is_temporary: bool = False


class Router(Protocol):
    """Decides where a request goes.

    A router keeps what it needs of its own decisions; who calls it reports each end.
    """

    def choose(self, request: RoutedRequest, views: Views, now_s: float) -> int | Refusal:
        """The position in `views` of the instance that gets the request, or why none does.

        The caller sends the request there. Positions keep their meaning as long as a request is
        there: an instance that dies stays in the list with `is_alive` False, and one that joins is
        appended, or takes the place of one that is gone.
        """

    def ended(self, req_id: str, instance: int) -> None:
        """The request is no longer on the instance: complete, failed or aborted."""


def can_serve(view: InstanceView, request: RoutedRequest) -> bool:
    """Whether the instance is alive and can hold the request."""
    return view.is_alive and view.fits(request.prompt_tokens + 1)


def candidates(request: RoutedRequest, views: Views) -> list[int]:
    """Positions of the instances that are alive and can hold the request, if any can.

    Those on which it has failed before are left out as long as another is there.
    """
    able = [i for i, view in enumerate(views) if can_serve(view, request)]
    fresh = [i for i in able if i not in request.avoid] if request.avoid else able
    return fresh or able


def refusal(request: RoutedRequest, views: Views) -> Refusal:
    """Why `candidates` is empty."""
    alive = [view for view in views if view.is_alive]
    if not alive:
        return Refusal(f"none of {len(views)} instances is alive", is_temporary=True)
    most = max(min(view.max_model_len, view.kv_capacity_tokens) for view in alive)
    return Refusal(
        f"a prompt of {request.prompt_tokens} tokens and one output token do not fit into the "
        f"{most} tokens of the largest instance"
    )


def _lowest(name: str) -> int:
    return 0 if name in ("kv_used_tokens", "num_unreported", "num_waiting_lost") else 1


def _check_rows(view: InstanceView, names: Sequence[str]) -> None:
    length = len(getattr(view, names[0]))
    columns = [getattr(view, name) for name in names]
    for name, values in zip(names, columns, strict=True):
        if not isinstance(values, np.ndarray) or values.shape != (length,):
            raise ReportError(
                f"'{name}' must have one number for each of {length} requests "
                f"(got shape {np.shape(values)})."
            )
    if not length:
        return
    # All at once, since nearly every report is as it should be. A bank may be anything but NaN.
    table = np.concatenate([c for c, n in zip(columns, names, strict=True) if n != _BANK])
    banks = [c for c, n in zip(columns, names, strict=True) if n == _BANK]
    if 0.0 <= table.min() <= table.max() < math.inf and not any(np.isnan(c).any() for c in banks):
        return
    for name, values in zip(names, columns, strict=True):
        is_bank = name == _BANK
        wrong = np.isnan(values) if is_bank else ~(np.isfinite(values) & (values >= 0.0))
        if wrong.any():
            raise ReportError(
                f"'{name}' must hold numbers {'' if is_bank else '>= 0 '}"
                f"that are not NaN (got {values[wrong][0]} at {int(wrong.argmax())})."
            )
