"""When a request's first token would come, if it were sent to an instance now."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sola_sched.cluster.view import FloatArray, InstanceView


def predicted_ttft_s(view: InstanceView, prompt_tokens: int, now_s: float) -> float:
    """Seconds from now to the first token of a prompt sent to the instance, >= 0.

    The prompts there are computed in order of arrival, in chunks of the token budget that is left
    beside the decodes, and every step with a chunk costs the decodes' time too. If no slot or no
    KV is free, the request waits until enough of those that run have ended, in order of what they
    have left, and of those that wait before it; meanwhile prompts are computed. The work that was
    reported has gone on since; what was sent since has not begun. Lost requests that the engine
    serves last are in nobody's way. Preemptions are not foreseen: where memory is short the time
    is up to a fifth too little.
    """
    queue = view.kept("queue", lambda: _queue_of(view))
    left_s = queue.reported_s - max(0.0, now_s - view.reported_s)
    own_s = float(view.model.prefill_s(prompt_tokens)) - queue.constant_s
    num_steps = math.ceil((queue.sent_tokens + prompt_tokens) / queue.budget)
    return max(0.0, left_s) + queue.sent_chunks_s + own_s + num_steps * queue.step_s


class _Queue(NamedTuple):
    """What is before a new prompt, whatever its length.

    Attributes:
        reported_s: Time from the report until what was reported lets it begin.
        sent_tokens, sent_chunks_s: Prompts sent since, and their time without that of whole steps.
        budget: Prompt tokens of a step.
        step_s: What each step with a chunk takes, however long the chunk.
        constant_s: What `prefill_s` has of it.
    """

    reported_s: float
    sent_tokens: float
    sent_chunks_s: float
    budget: float
    step_s: float
    constant_s: float


def _queue_of(view: InstanceView) -> _Queue:
    num_reported = len(view.waiting_tokens) - view.num_unreported
    ahead = view.waiting_ahead
    reported = np.concatenate((view.running_prefill, ahead[:num_reported]))
    sent = ahead[num_reported:]
    num_decodes = float(np.count_nonzero(view.running_prefill == 0.0))
    decode_s = (
        float(view.model.decode_s(num_decodes, view.running_ctx.sum())) if num_decodes else 0.0
    )
    budget = max(1.0, view.max_num_batched_tokens - num_decodes)
    constant_s = float(view.model.prefill_s(0.0))
    step_s = max(constant_s, decode_s)

    def chunks_s(prompts: FloatArray) -> float:
        # A prompt of several chunks attends to what was before: as one chunk it costs the same.
        prompts = prompts[prompts > 0.0]
        return float(np.sum(view.model.prefill_s(prompts) - constant_s)) if len(prompts) else 0.0

    turnover_s = max(_wait_s(view), math.ceil(float(reported.sum()) / budget) * step_s)
    return _Queue(
        turnover_s + chunks_s(reported), float(sent.sum()), chunks_s(sent), budget, step_s,
        constant_s,
    )  # fmt: skip


def _wait_s(view: InstanceView) -> float:
    """Time until a slot and memory are free for one more request, in the order of arrival.

    Who waits takes a slot before it, and holds that for its expected output. Memory is freed by
    those that run; after that it turns over as those that wait come and go.
    """
    num_ahead = view.num_waiting - (view.num_waiting_lost if view.serves_lost_last else 0)
    capacity, prompts = float(view.kv_capacity_tokens), float(view.waiting_ahead.sum())
    needed = prompts - (capacity - view.kv_used_tokens)
    if num_ahead < view.num_free_slots and needed <= 0.0:
        return 0.0
    mean_output = float(view.waiting_outputs.mean()) if view.num_waiting else 0.0
    held = prompts + 0.5 * mean_output * num_ahead
    at_once = min(num_ahead, view.max_num_seqs)
    if needed > 0.0:
        at_once = min(at_once, math.ceil(num_ahead * capacity / held))
    ctx = float(view.running_ctx.sum()) if view.num_running else min(held, capacity)
    step_s = float(view.model.decode_s(max(view.num_running, at_once), ctx))
    each_s = mean_output * step_s
    order = np.argsort(view.running_left)
    ends_s = view.running_left[order] * step_s
    starts_s = np.concatenate((np.zeros(min(view.num_free_slots, num_ahead + 1)), ends_s))
    times, slot = divmod(num_ahead, len(starts_s))
    wait_s = float(starts_s[slot]) + times * each_s
    if times:
        wait_s = max(wait_s, float(starts_s[-1]) + (times - 1) * each_s)
    if needed <= 0.0:
        return wait_s
    freed = np.cumsum(view.running_ctx[order])
    last = int(np.searchsorted(freed, needed))
    if last < len(freed):
        return max(wait_s, float(ends_s[last]))
    turns = (needed - (float(freed[-1]) if len(freed) else 0.0)) * held / (prompts * capacity)
    return max(wait_s, float(ends_s.max(initial=0.0)) + turns * each_s)
