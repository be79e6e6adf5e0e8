"""The runtime mapper of unequal instances: the request goes where the largest load stays smallest.

Source: Y. Xiong et al., *High-Throughput LLM inference on Heterogeneous Clusters*, section 4. What
request r takes on instance s is its share of a batch that fills the memory with requests like it:

    b_r^s = KVTotal_s / KVSize(r)                                               (Eq. 5)
    T_r^s = (T_prefill(s, B_r) + T_decode(s, B_r)) / b_r^s                      (Eq. 6)

Departures: b is at least 1, and at most the slots of the instance, which the paper does not have.
"""

from __future__ import annotations

from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.cluster.routers import MemoryBased
from sola_sched.cluster.view import InstanceView, RoutedRequest, StepModel


class WorkloadMapper(MemoryBased):
    """The heterogeneous paper's Algorithm 2: `MemoryBased` with the T of Eq. 6.

    Times are those of the views' models: p1 to p8 where that is a `StaticBatchTime`, else the same
    sums from the times of single steps.
    """

    def work_s(self, request: RoutedRequest, view: InstanceView) -> float:
        """T of the request on the instance, seconds."""
        batch = view.kv_capacity_tokens / max(1.0, request.peak_tokens)
        batch = min(max(1.0, batch), float(view.max_num_seqs))
        return _batch_s(view.model, batch, request.prompt_tokens, request.length.mean) / batch


def _batch_s(model: StepModel, batch: float, prompt_tokens: int, output_tokens: float) -> float:
    """Time of a static batch of equal requests, seconds."""
    if isinstance(model, StaticBatchTime):
        return float(model.batch_s(batch, prompt_tokens, output_tokens))
    constant_s = float(model.prefill_s(0.0))
    prefill_s = batch * (float(model.prefill_s(prompt_tokens)) - constant_s) + constant_s
    # Decode time is linear in the context: the sum over the steps is that of the mean context.
    mean_context = prompt_tokens + (output_tokens + 1.0) / 2.0
    step_s = float(model.decode_s(batch, batch * mean_context))
    return prefill_s + output_tokens * step_s
