"""Aladdin's model of one instance: KV memory, prefill, decode, and the context that an SLO leaves.

Source: C. Nie, R. Fonseca, Z. Liu, *Aladdin: Joint Placement and Scaling for SLO-Aware LLM
Serving*, section 3:

    kv    = h (l_in + l_out) + j                      (Eq. 1)
    t_pre = k1 sum(l_in) + c1                         (Eq. 2)
    t_d   = (k2 l_ave + c2) b + c3                    (Eq. 3)
    l_d  <= (T_dec - c3 - c2 b) / k2                  (Eq. 4)

b l_ave is the sum of the contexts, so Eq. 3 is linear in it and in b. Departure: Eq. 3 is used for
b = 1 as well, where the paper takes a constant; the difference is k2 times one context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sola_sched.errors import ProfileError

#: Unit of each coefficient, as stored in files.
UNITS: Mapping[str, Mapping[str, str]] = {
    "kv": {"bytes_per_token": "bytes/token", "bytes_per_request": "bytes/request"},
    "prefill": {"per_token_s": "s/token", "base_s": "s"},
    "decode": {"per_ctx_s": "s/token", "per_request_s": "s/request", "base_s": "s"},
}


@dataclass(frozen=True, slots=True)
class KvUse:
    """Eq. 1: memory of a request by its tokens.

    Attributes:
        bytes_per_token: h, on all GPUs of the instance together; > 0.
        bytes_per_request: j, the part of blocks that stays empty; >= 0.
    """

    bytes_per_token: float
    bytes_per_request: float = 0.0

    def __post_init__(self) -> None:
        _require(self, above_zero=("bytes_per_token",))

    def bytes_of(self, num_tokens: Any) -> Any:
        """Bytes of a request of so many tokens, prompt and output; elementwise."""
        return self.bytes_per_token * num_tokens + self.bytes_per_request


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Eq. 2: time of a prefill step.

    Attributes:
        per_token_s: k1, >= 0.
        base_s: c1, >= 0.
    """

    per_token_s: float
    base_s: float

    def __post_init__(self) -> None:
        _require(self)

    def seconds(self, num_tokens: Any) -> Any:
        """Seconds to prefill so many prompt tokens in all; elementwise."""
        return self.per_token_s * num_tokens + self.base_s


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Eq. 3: time of a decode step, and Eq. 4: the context that fits in a given time.

    Attributes:
        per_ctx_s: k2, >= 0.
        per_request_s: c2, >= 0.
        base_s: c3, >= 0.
    """

    per_ctx_s: float
    per_request_s: float
    base_s: float

    def __post_init__(self) -> None:
        _require(self)

    def seconds(self, num_requests: Any, ctx_tokens: Any) -> Any:
        """Seconds of a step of so many requests with that much context in all; elementwise."""
        return self.per_ctx_s * ctx_tokens + self.per_request_s * num_requests + self.base_s

    def context_limit(self, num_requests: float, tpot_s: float) -> float:
        """Eq. 4: context tokens of all requests together with which a step still takes `tpot_s`.

        Negative where so many requests cannot have it with any context; inf where context costs
        nothing.
        """
        room_s = tpot_s - self.base_s - self.per_request_s * num_requests
        if self.per_ctx_s == 0.0:
            return math.copysign(math.inf, room_s)
        return room_s / self.per_ctx_s


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """What placement knows of the kind of an instance: model, GPU, tensor parallel degree.

    It is a `StepModel` of `sola_sched.cluster.view` as well.

    Attributes:
        name: Shown in results and messages.
        kv: Memory by tokens.
        prefill, decode: Times of steps.
        kv_capacity_bytes: Memory for KV on all its GPUs; inf if unknown.
        num_gpus: GPUs that share each step.
    """

    name: str
    kv: KvUse
    prefill: PrefillTime
    decode: DecodeTime
    kv_capacity_bytes: float = math.inf
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if not self.kv_capacity_bytes > 0.0:
            raise ProfileError(
                f"'kv_capacity_bytes' of {self.name!r} must be > 0 (got "
                f"{self.kv_capacity_bytes!r}); take more GPUs or a smaller model."
            )
        if self.num_gpus < 1:
            raise ProfileError(f"'num_gpus' of {self.name!r} must be >= 1 (got {self.num_gpus}).")

    @property
    def kv_capacity_tokens(self) -> float:
        """Tokens of one request that would fill the memory; inf if unknown."""
        free = self.kv_capacity_bytes - self.kv.bytes_per_request
        return max(0.0, free) / self.kv.bytes_per_token

    @property
    def kv_tokens_per_request(self) -> float:
        """j in tokens: memory that each request takes beside its tokens."""
        return self.kv.bytes_per_request / self.kv.bytes_per_token

    def prefill_s(self, new_tokens: Any) -> Any:
        """Seconds to prefill so many prompt tokens; elementwise."""
        return self.prefill.seconds(new_tokens)

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """Seconds of a decode step; elementwise."""
        return self.decode.seconds(num_decodes, ctx_tokens)


def _require(part: Any, *, above_zero: tuple[str, ...] = ()) -> None:
    for name in (field.name for field in fields(part)):
        value = getattr(part, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        lowest = ">" if name in above_zero else ">="
        if not is_number or not 0.0 <= value < math.inf or (lowest == ">" and value == 0.0):
            raise ProfileError(
                f"'{type(part).__name__}.{name}' must be finite and {lowest} 0 (got {value!r}); "
                "fit the model to measurements again."
            )
