"""Baseline policies: other schedulers' rules, on vLLM's own `schedule()`.

| name | rule | needs |
| --- | --- | --- |
| `prefill-first` | whole prompts first, alone in their step; else decodes (vLLM 0.4.2) | - |
| `decode-first` | a batch decodes until all of it has ended (FasterTransformer) | - |
| `sjf` | shortest job first, output length predicted per class (SOLA's SJF) | finished requests |
| `sjf-oracle` | the same with the true output length | true lengths |
| `spf` | shortest prompt first | - |
| `hrrn` | highest response ratio next, (wait + service) / service | finished requests |
| `reject` | FCFS; refuses arrivals that must miss TTFT behind the queued prompts | TTFT targets |

No order displaces a request that has started.

Two more need no class: vLLM itself with `scheduling_policy` `fcfs` (decodes, then prefill chunks
in what is left of the budget) and `priority`. All rules run with asynchronous scheduling on and
off; where a rule says nothing (victims when memory is short, prefix cache, budgets) vLLM decides.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from sola_sched.config.slo import request_target
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.simulator.baselines.base import Baseline, Ordered, Rule

#: Per-request key (`SamplingParams.extra_args`) of the true output length, tokens.
ORACLE_KEY = "sola_oracle_output_tokens"

_WATERMARK_RATIO = 0.01
# About the last 50 steps count.
_RATE_DECAY = 0.98


class PrefillFirst(Baseline):
    """Prompts before decodes, never both in one step.

    Source: vLLM 0.4.2's default, vLLM-D in SOLA (Hong et al., MLSys 2025), section 6.1. While the
    oldest waiting request finds a slot and blocks for its prompt (1 % of all blocks stay free for
    the decodes), a step computes whole prompts, oldest first, up to the token budget. Departure:
    a prompt longer than the budget is not refused but computed in chunks, alone.
    """

    def plan(self) -> Rule:
        if any(request.is_prefill_chunk for request in self.running):
            return Rule(admit=[], holds_decodes=True)
        chosen = self._whole_prompts()
        if not chosen:
            return Rule(admit=[])
        num_tokens = sum(request.num_tokens for request in chosen)
        return Rule(admit=chosen, holds_decodes=True, token_budget=num_tokens)

    def _whole_prompts(self) -> list[Request]:
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        if self.running:
            num_free -= int(_WATERMARK_RATIO * pool.num_gpu_blocks)
        num_tokens_left = self.max_num_scheduled_tokens
        num_slots = self._num_free_slots()
        chosen: list[Request] = []
        for request in self.waiting:
            num_free -= self._num_blocks(request.num_tokens)
            num_tokens_left -= request.num_tokens
            if len(chosen) >= num_slots or num_free < 0 or (chosen and num_tokens_left < 0):
                break
            chosen.append(request)
        return chosen


class DecodeFirst(Baseline):
    """Decodes are never delayed: no request starts while another one decodes.

    The decode-prioritizing schedule of FasterTransformer, as Sarathi-Serve (Agrawal et al., OSDI
    2024) names it: requests are batched as wholes. When nothing runs, the oldest waiting requests
    form a batch, as many as find slots and blocks for prompt and `max_tokens`, so that none of
    them is preempted later. Their prompts are computed first, in as many steps as the token budget
    asks for; then all decode until the last one has ended. The mirror of prefill-first: the best
    TPOT that a step without prefill can give, and the longest wait for the first token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch: set[Request] = set()

    def plan(self) -> Rule:
        if not self.running:
            self._batch = self._next_batch()
        joining = [request for request in self.waiting if request in self._batch]
        if joining or any(request.is_prefill_chunk for request in self.running):
            return Rule(admit=joining, holds_decodes=True)
        self._batch.clear()  # one that loses its KV now waits for the next batch
        return Rule(admit=[])

    def _next_batch(self) -> set[Request]:
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        num_slots = self._num_free_slots()
        batch: set[Request] = set()
        for request in self.waiting:
            num_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            num_free -= self._num_blocks(num_tokens)
            if len(batch) >= num_slots or (batch and num_free < 0):
                break
            batch.add(request)
        return batch


class ShortestPrefillFirst(Ordered):
    """The shortest prompt starts next."""

    def keys(self, waiting: list[Request]) -> list[float] | None:
        return [request.num_tokens for request in waiting]


class _ByService(Ordered):
    """Orders that rest on the service time of a request: prompt and output, served alone.

    The step times are learned from live steps, or read from the profile of the options; until
    they are known the order is that of arrival.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        profile = self.sola_config.profile
        self._cost = CostModel.load(profile) if profile else CostModel()
        self._lengths = LengthHistogram()
        self._last_end_s = -math.inf
        # Shape and start of the steps whose output is still to come, first in first out.
        self._steps: list[tuple[StepShape, float]] = []

    def output_lengths(self, waiting: list[Request]) -> np.ndarray[Any, Any]:
        """Predicted output tokens of each request, from finished ones of its class."""
        classes = [self._class_of(request) for request in waiting]
        limits = np.array([request.max_tokens for request in waiting])
        none = np.zeros(len(waiting), dtype=np.int64)
        return self._lengths.remaining(np.array(classes), none, limits)

    def service_s(self, waiting: list[Request]) -> np.ndarray[Any, Any]:
        """Seconds that each request takes with the engine to itself."""
        prompts = np.array([request.num_tokens for request in waiting], dtype=np.float64)
        outputs = self.output_lengths(waiting)
        one = np.ones(len(waiting))
        decode_s = self._cost.decode_s(one, prompts + 0.5 * outputs)
        seconds: np.ndarray[Any, Any] = self._cost.prefill_s(prompts) + outputs * decode_s
        return seconds

    def _class_of(self, request: Request) -> int:
        return self._lengths.class_of(request.num_prompt_tokens, max(1, request.max_tokens))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._steps.append((self._shape(output.num_scheduled_tokens), self.sola_clock()))
        return output

    def _shape(self, scheduled: dict[str, int]) -> StepShape:
        num_decodes = ctx = tokens = 0
        squares = has_tokens = 0.0
        for name, n in scheduled.items():
            has = self.requests[name].num_computed_tokens - n
            if n == 1:
                num_decodes += 1
                ctx += has
            else:
                tokens += n
                squares += n * n
                has_tokens += n * has
        return StepShape(num_decodes, ctx, tokens, squares, has_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        shape, start_s = self._steps.pop(0)
        now_s = self.sola_clock()
        # A step that was scheduled while another one ran started when that one ended.
        self._cost.observe(shape, now_s - max(start_s, self._last_end_s))
        self._last_end_s = now_s
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        ):
            self._lengths.observe(self._class_of(request), request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)


class ShortestJobFirst(_ByService):
    """The shortest predicted service time starts next.

    Source: SOLA, section 6.1 (after Wu et al., 2023 and Fu et al., 2024). Lengths come from the
    same per-class histogram as in `sola_sched.Scheduler`.
    """

    def keys(self, waiting: list[Request]) -> list[float] | None:
        return list(self.service_s(waiting)) if self._cost.is_ready else None


class OracleShortestJobFirst(ShortestJobFirst):
    """`ShortestJobFirst` with the true output length of `extra_args["sola_oracle_output_tokens"]`.

    Raises:
        ValueError: From `add_request`, when a request does not name its length.
    """

    def add_request(self, request: Request) -> None:
        _true_length(request)
        super().add_request(request)

    def output_lengths(self, waiting: list[Request]) -> np.ndarray[Any, Any]:
        return np.array([_true_length(request) for request in waiting], dtype=np.float64)


class HighestResponseRatioNext(_ByService):
    """The largest (wait + service) / service starts next, so that long jobs age into their turn.

    Source: Brinch Hansen, 1971. Service is what `ShortestJobFirst` predicts.
    """

    def keys(self, waiting: list[Request]) -> list[float] | None:
        if not self._cost.is_ready:
            return None
        now_s = self.sola_wall_clock()
        wait_s = np.array([now_s - request.arrival_time for request in waiting])
        # (wait + service) / service falls with service / wait: no division by zero waits.
        return list(-wait_s / np.maximum(self.service_s(waiting), 1e-12))


class RejectAtSlo(Baseline):
    """FCFS that refuses an arrival whose TTFT target the queued prompts rule out.

    The rule of vLLM's `max_num_queued_tokens`, "target TTFT x prefill throughput", which vLLM's
    API server applies; here each request's own target and the measured throughput make the limit:
    it is refused if other prompts wait and they, with its own, are more tokens than the engine
    computes in that time. Throughput is measured over recent steps that left prompts waiting;
    before any, nobody is refused. When the engine sets `max_num_queued_tokens`, that is the limit
    and vLLM's count is used: all tokens of all prompts that have no first token yet.

    A refused request ends at once, without tokens, with finish reason "error".

    Attributes:
        num_rejected: Requests refused since start.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_rejected = 0
        self._rejected: list[Request] = []
        self._steps: list[tuple[int, float]] = []  # prompt tokens (0: not saturated), start
        self._last_end_s = -math.inf
        self._tokens = self._seconds = 0.0

    def add_request(self, request: Request) -> None:
        is_refused = request.request_id not in self.requests and self._must_miss(request)
        super().add_request(request)
        if is_refused:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self._rejected.append(request)
            self.num_rejected += 1

    def _must_miss(self, request: Request) -> bool:
        queued = [r for r in self.requests.values() if not r.num_output_tokens]
        fixed = getattr(self.scheduler_config, "max_num_queued_tokens", None)
        if fixed is not None:
            return sum(r.num_prompt_tokens for r in queued) >= fixed
        backlog = sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in queued)
        if not backlog or not self._seconds:
            return False
        params = request.sampling_params
        target = request_target(
            params.extra_args if params is not None else None,
            self.sola_config.default_slo,
            self.sola_config.classes,
        )
        limit = target.ttft_s * self._tokens / self._seconds
        return backlog + request.num_prompt_tokens > limit

    def has_requests(self) -> bool:
        return bool(self._rejected) or super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        # One token is a decode, or as cheap as one.
        num_tokens = sum(n for n in output.num_scheduled_tokens.values() if n > 1)
        saturated = bool(self.waiting) or any(r.is_prefill_chunk for r in self.running)
        self._steps.append((num_tokens if saturated else 0, self.sola_clock()))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        num_tokens, start_s = self._steps.pop(0)
        now_s = self.sola_clock()
        if num_tokens:
            self._tokens = _RATE_DECAY * self._tokens + num_tokens
            self._seconds = _RATE_DECAY * self._seconds + now_s - max(start_s, self._last_end_s)
        self._last_end_s = now_s
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in self._rejected:
            answer = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)
        self._rejected.clear()
        return outputs


def _true_length(request: Request) -> int:
    params = request.sampling_params
    value = ((params.extra_args if params is not None else None) or {}).get(ORACLE_KEY)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"extra_args[{ORACLE_KEY!r}] of request {request.request_id!r} must be an integer "
            f">= 1 for an oracle baseline (got {value!r})."
        )
    return value


BASELINES: dict[str, type[Baseline]] = {
    "prefill-first": PrefillFirst,
    "decode-first": DecodeFirst,
    "sjf": ShortestJobFirst,
    "sjf-oracle": OracleShortestJobFirst,
    "spf": ShortestPrefillFirst,
    "hrrn": HighestResponseRatioNext,
    "reject": RejectAtSlo,
}
"""Scheduler class by name; the table is in the module's docstring."""
