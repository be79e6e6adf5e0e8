"""Measured steps in the form that all performance models are fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import ProfileError

FloatArray = NDArray[np.float64]


class _Columns:
    """Equally long columns of finite numbers, none negative."""

    def __post_init__(self) -> None:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        length = len(next(iter(columns.values())))
        for name, values in columns.items():
            array = np.asarray(values, dtype=np.float64)
            if array.shape != (length,):
                raise ProfileError(
                    f"'{name}' must have one number for each of {length} samples "
                    f"(got shape {array.shape})."
                )
            wrong = ~(np.isfinite(array) & (array >= 0.0))
            if name == "seconds":
                wrong |= array == 0.0
            if wrong.any():
                least = ">" if name == "seconds" else ">="
                raise ProfileError(
                    f"'{name}' must be finite and {least} 0 (got {array[wrong][0]} in sample "
                    f"{int(wrong.argmax())}); leave out what was not measured."
                )
            object.__setattr__(self, name, array)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """The samples of rows that have the columns in order."""
        width = len(fields(cls))  # type: ignore[arg-type]
        table = np.array(rows, dtype=np.float64).reshape(-1, width)
        return cls(*table.T)


@dataclass(frozen=True)
class _StepSamples(_Columns):
    """Steps in which all requests do the same; one entry a step.

    Attributes:
        num_requests: Requests in the step [n].
        longest: Tokens of the longest prompt, or of the longest context of a decode [n].
        total_tokens: Sum of all prompts, or of all contexts [n].
        seconds: Time of the step [n].
    """

    num_requests: FloatArray
    longest: FloatArray
    total_tokens: FloatArray
    seconds: FloatArray


class PrefillSamples(_StepSamples):
    """Steps that prefill whole prompts and nothing else."""


class DecodeSamples(_StepSamples):
    """Steps in which requests decode and nothing else happens."""


@dataclass(frozen=True)
class KvSamples(_Columns):
    """Memory of single requests.

    Attributes:
        num_tokens: Prompt and output so far [n].
        num_bytes: Memory that their blocks take on all GPUs [n].
    """

    num_tokens: FloatArray
    num_bytes: FloatArray


def block_samples(bytes_per_token: float, *, block_size: int, longest: int) -> KvSamples:
    """Memory of requests in a paged cache: whole blocks, of lengths spread up to `longest`."""
    # A stride without a factor in common with blocks, so that all fillings of the last one occur.
    tokens: FloatArray = np.arange(1.0, longest + 1.0, 7.0, dtype=np.float64)
    return KvSamples(tokens, np.ceil(tokens / block_size) * block_size * bytes_per_token)
