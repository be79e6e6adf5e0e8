"""Samples from steps of a live engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sola_sched.cluster.performance.samples import DecodeSamples, PrefillSamples


class StepShapeLike(Protocol):
    """What is read of a step; `sola_sched`'s `StepShape` is one."""

    @property
    def num_decodes(self) -> int: ...
    @property
    def decode_ctx_tokens(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...


def samples_of_steps(
    steps: Iterable[tuple[StepShapeLike, float]],
) -> tuple[PrefillSamples, DecodeSamples]:
    """Steps with prefill only and steps with decodes only; mixed ones are left out.

    A shape has no lengths of single requests: a prefill counts as one prompt, and the contexts of
    a decode step as equal.

    Args:
        steps: Shapes and times in seconds, as `CostModel.fit` takes them.
    """
    prefill, decode = [], []
    for shape, seconds in steps:
        if shape.num_decodes == 0 and shape.prefill_tokens > 0:
            prefill.append((1, shape.prefill_tokens, shape.prefill_tokens, seconds))
        elif shape.num_decodes > 0 and shape.prefill_tokens == 0:
            b, ctx = shape.num_decodes, shape.decode_ctx_tokens
            decode.append((b, ctx / b, ctx, seconds))
    return PrefillSamples.of_rows(prefill), DecodeSamples.of_rows(decode)
