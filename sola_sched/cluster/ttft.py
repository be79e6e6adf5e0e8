"""When a request's first token would come, if it were sent to an instance now."""

from __future__ import annotations

import numpy as np

from sola_sched.cluster.view import FloatArray, InstanceView


def predicted_ttft_s(view: InstanceView, prompt_tokens: int, now_s: float) -> float:
    """Seconds from now to the first token of a prompt sent to the instance, >= 0.

    The prompts there are computed in order of arrival, in chunks of the token budget that is left
    beside the decodes, and every step with a chunk costs the decodes' time too. If no slot or no
    KV is free, the request waits first until enough of those that run have ended, in order of what
    they have left. The work that was reported has gone on since; what was sent since has not begun.
    """
    num_reported = len(view.waiting_tokens) - view.num_unreported
    reported = np.concatenate((view.running_prefill, view.waiting_tokens[:num_reported]))
    unreported = view.waiting_tokens[num_reported:]
    age_s = max(0.0, now_s - view.reported_s)
    left_s = max(_wait_s(view), _prompts_s(view, reported)) - age_s
    return max(0.0, left_s) + _prompts_s(view, np.append(unreported, prompt_tokens))


def _prompts_s(view: InstanceView, prompts: FloatArray) -> float:
    """Time to compute these prompts one after the other beside the decodes."""
    prompts = prompts[prompts > 0.0]
    if not len(prompts):
        return 0.0
    num_decodes = float(np.count_nonzero(view.running_prefill == 0.0))
    decode_s = (
        float(view.model.decode_s(num_decodes, view.running_ctx.sum())) if num_decodes else 0.0
    )
    budget = max(1.0, view.max_num_batched_tokens - num_decodes)
    constant_s = float(view.model.prefill_s(0.0))
    num_steps = np.ceil(prompts.sum() / budget)
    # A prompt of several chunks attends to what was before: as one chunk it costs the same.
    chunks_s = float(np.sum(view.model.prefill_s(prompts) - constant_s))
    return chunks_s + float(num_steps) * max(constant_s, decode_s)


def _wait_s(view: InstanceView) -> float:
    """Time until a slot and memory are free for one more request, in the order of arrival."""
    num_running, num_ahead = view.num_running, view.num_waiting
    short = num_ahead + 1 - view.num_free_slots
    needed = view.waiting_tokens.sum() - (view.kv_capacity_tokens - view.kv_used_tokens)
    if num_running == 0 or (short <= 0 and needed <= 0):
        return 0.0
    order = np.argsort(view.running_left)
    step_s = float(view.model.decode_s(num_running, view.running_ctx.sum()))
    ends_s = view.running_left[order] * step_s
    freed = np.cumsum(view.running_ctx[order])
    for_memory = int(np.searchsorted(freed, needed)) + 1 if needed > 0 else 0
    ends = max(short, for_memory)
    if ends <= num_running:
        return float(ends_s[ends - 1])
    # Those that wait run and end too: at the rate of the slots, each for its expected output.
    mean_output = float(view.waiting_outputs.mean()) if num_ahead else 0.0
    more = (ends - num_running) / view.max_num_seqs
    return float(ends_s[-1]) + more * mean_output * step_s
