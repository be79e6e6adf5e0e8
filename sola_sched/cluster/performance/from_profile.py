"""Samples from a step profile, as the simulator's: so each model and GPU that ships can be placed.

A profile gives the time of any step; it is asked for whole prompts and for decode batches that fit
in its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sola_sched.cluster.performance.files import FittedModel
from sola_sched.cluster.performance.fitting import fit_performance
from sola_sched.cluster.performance.samples import (
    DecodeSamples,
    KvSamples,
    PrefillSamples,
    block_samples,
)
from sola_sched.errors import ProfileError

PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


class StepProfileLike(Protocol):
    """What is read of a profile; `sola_sched.simulator.StepProfile` is one."""

    @property
    def name(self) -> str: ...
    @property
    def step_time(self) -> Any: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    num_scheduled_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Request:
    num_computed_tokens: int


def step_seconds(step_time: Any, lengths: Sequence[tuple[int, int]]) -> float:
    """Time of a step by a profile; each request as (tokens it has, tokens of the step)."""
    names = [str(i) for i in range(len(lengths))]
    output = _Step({name: new for name, (_, new) in zip(names, lengths, strict=True)})
    requests = {name: _Request(has + new) for name, (has, new) in zip(names, lengths, strict=True)}
    return float(step_time(output, requests))


def samples_of_profile(
    profile: StepProfileLike,
) -> tuple[PrefillSamples, DecodeSamples, KvSamples]:
    """Steps and requests of many sizes that the profile's memory and context length allow.

    Raises:
        ProfileError: The profile does not tell its memory (one measured on a live engine).
    """
    capacity, longest = _memory(profile)
    prefill = [
        (b, n, b * n, step_seconds(profile.step_time, [(0, n)] * b))
        for b in (1, 2, 4, 8)
        for n in PROMPTS
        if n <= longest and b * n <= max(PROMPTS)
    ]
    decode = [
        (b, ctx, b * ctx, step_seconds(profile.step_time, [(ctx, 1)] * b))
        for b in BATCHES
        for ctx in CONTEXTS
        if ctx < longest and b * (ctx + 1) <= capacity
    ]
    per_token = (profile.kv_bytes_per_token or 0) * profile.tensor_parallel
    kv = block_samples(per_token, block_size=profile.block_size, longest=longest)
    return PrefillSamples.of_rows(prefill), DecodeSamples.of_rows(decode), kv


def fit_profile(profile: StepProfileLike) -> FittedModel:
    """The performance model of a profile.

    Raises:
        ProfileError: As for `samples_of_profile`.
    """
    prefill, decode, kv = samples_of_profile(profile)
    capacity, _ = _memory(profile)
    per_token = (profile.kv_bytes_per_token or 0) * profile.tensor_parallel
    model, errors = fit_performance(
        profile.name, prefill, decode, kv,
        kv_capacity_bytes=float(capacity * per_token), num_gpus=profile.tensor_parallel,
    )  # fmt: skip
    return FittedModel(model, errors, f"step profile {profile.name}")


def _memory(profile: StepProfileLike) -> tuple[int, int]:
    known = (profile.num_blocks, profile.max_model_len, profile.kv_bytes_per_token)
    if profile.num_blocks is None or profile.max_model_len is None or not known[2]:
        raise ProfileError(
            f"Profile {profile.name!r} must tell num_blocks, max_model_len and kv_bytes_per_token "
            f"(got {known}); take one of the package."
        )
    # One block is vLLM's null block.
    return (profile.num_blocks - 1) * profile.block_size, profile.max_model_len
