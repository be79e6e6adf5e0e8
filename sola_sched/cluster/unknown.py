"""What routers compare an instance by that sends no reports, as those of stock vLLM."""

from __future__ import annotations

from sola_sched.cluster.view import InstanceView
from sola_sched.cost.file import Coefficients
from sola_sched.cost.plain import PlainStepTimes

#: Limits of a replica that has not said what it is, beyond any request.
_UNKNOWN = 2**31 - 1
_LONG_AGO_S = 1e6
ANY_STEPS = PlainStepTimes(
    Coefficients(a0=0.0, b0=0.0, c0=1e-4, d0=0.01, a1=1e-4, b1=0.0, c1=0.01, overlap=0.01)
)


def unknown_view(now_s: float, like: InstanceView | None = None) -> InstanceView:
    """The view of a replica that has sent no report: what routers compare it by.

    Whether a request fits is its own to say: its memory and its longest request are beyond any.

    Args:
        now_s: The present, seconds.
        like: One that has reported: it is taken to be as fast, and to run as many requests. None
            where nobody has: then only how many requests each has matters.
    """
    return InstanceView(
        model=ANY_STEPS if like is None else like.model,
        kv_capacity_tokens=_UNKNOWN,
        max_num_seqs=_UNKNOWN if like is None else like.max_num_seqs,
        max_num_batched_tokens=8192 if like is None else like.max_num_batched_tokens,
        max_model_len=_UNKNOWN,
        reported_s=now_s - _LONG_AGO_S,
    )
