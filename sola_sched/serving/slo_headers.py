"""SLO headers of the Gateway API's inference extension and of llm-d, as vLLM's free arguments.

These are `vllm_xargs` of a body, and `extra_args` of `sampling_params` in one of `GENERATE`.

| header | key |
| --- | --- |
| `x-slo-ttft-ms`, `x-llm-d-slo-ttft-ms` | `ttft_slo_ms` |
| `x-slo-tpot-ms`, `x-llm-d-slo-tpot-ms` | `tpot_slo_ms` |
| `x-slo-e2e-ms` | `e2e_slo_ms` |
| `x-gateway-inference-objective` | `slo_class` |

The body wins: a key that it has is taken from it, and one that names a class has said all targets.
`x-slo-e2e-ms` is ours, in their form: neither names the time to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sola_sched.config.slo import (
    CLASS_KEY,
    E2E_KEY,
    GATEWAY_KEYS,
    MOST,
    REQUEST_KEYS,
    TPOT_KEY,
    TTFT_KEY,
)
from sola_sched.errors import SloError
from sola_sched.proxy.json_object import inner, replaced

XARGS = "vllm_xargs"
#: Takes tokens, and has its free arguments within those of sampling.
GENERATE = "/inference/v1/generate"
SAMPLING = "sampling_params"
_INNER_XARGS = "extra_args"
_MILLISECONDS = {
    "x-slo-ttft-ms": TTFT_KEY,
    "x-llm-d-slo-ttft-ms": TTFT_KEY,
    "x-slo-tpot-ms": TPOT_KEY,
    "x-llm-d-slo-tpot-ms": TPOT_KEY,
    "x-slo-e2e-ms": E2E_KEY,
}
_OBJECTIVE = "x-gateway-inference-objective"
#: All of them, in lower case.
SLO_HEADERS = frozenset((*_MILLISECONDS, _OBJECTIVE))


@dataclass(frozen=True)
class ClientRules:
    """What clients of a gateway may say of their requests.

    Attributes:
        is_behind_gateway: They are gateways of ours: what they say of a request's time elsewhere is
            believed. Of others it is dropped.
        drops_targets: Targets and classes are dropped too; the servers' own hold.
    """

    is_behind_gateway: bool = False
    drops_targets: bool = False

    @property
    def dropped(self) -> frozenset[str]:
        """Free arguments that do not go on."""
        clock = () if self.is_behind_gateway else GATEWAY_KEYS
        return frozenset((*clock, *(REQUEST_KEYS if self.drops_targets else ())))


def keys_from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """The per-request keys that HTTP headers ask for.

    Args:
        headers: Any mapping that ignores case, or one with names in lower case.

    Raises:
        SloError: A value is no finite number of milliseconds > 0, or two headers disagree.
    """
    keys: dict[str, Any] = {}
    for name, key in _MILLISECONDS.items():
        text = headers.get(name)
        if text is None:
            continue
        value = _milliseconds(name, text)
        if keys.setdefault(key, value) != value:
            raise SloError(
                f"headers for '{key}' must agree (got {keys[key]:g} and {value:g} milliseconds); "
                f"send one of them."
            )
    if (objective := headers.get(_OBJECTIVE)) is not None:
        keys[CLASS_KEY] = objective
    return keys


def xargs_of(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The free arguments of a request; empty without any.

    Args:
        path: Without a query.

    Raises:
        SloError: They are no object.
    """
    value: Any = body
    for name in (SAMPLING, _INNER_XARGS) if path == GENERATE else (XARGS,):
        value = inner(value, name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise SloError(f"'{name}' must be an object (got {value!r:.100}).")
    return dict(value)


def with_xargs(body: Mapping[str, Any], path: str, xargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with other free arguments."""
    if path != GENERATE:
        return replaced(body, **{XARGS: xargs})
    sampling = replaced(inner(body, SAMPLING) or {}, **{_INNER_XARGS: xargs})
    return replaced(body, **{SAMPLING: sampling})


def with_slo_headers(
    body: Mapping[str, Any], headers: Mapping[str, str], path: str = ""
) -> Mapping[str, Any]:
    """A request's `body` in which its headers' targets are free arguments.

    Raises:
        SloError: A header is wrong, or the free arguments are no object.
    """
    merged = with_headers(xargs_of(body, path), headers)
    return with_xargs(body, path, merged) if merged else body


def with_headers(xargs: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Free arguments, and what the headers add to them.

    Raises:
        SloError: A header is wrong.
    """
    asked = {} if xargs.get(CLASS_KEY) is not None else keys_from_headers(headers)
    return asked | {key: value for key, value in xargs.items() if value is not None}


def of_client(
    own: Mapping[str, Any], headers: Mapping[str, str], rules: ClientRules
) -> dict[str, Any] | None:
    """The free arguments with which a client's request goes on; None to leave them as they are.

    Args:
        own: Those that it came with.

    Raises:
        SloError: A header is wrong.
    """
    kept = {key: value for key, value in own.items() if key not in rules.dropped}
    if rules.is_behind_gateway:
        waited(kept)
    merged = kept if rules.drops_targets else with_headers(kept, headers)
    return merged if merged != own else None


def waited(xargs: Mapping[str, Any]) -> None:
    """Check what another gateway says of a request's time elsewhere.

    Raises:
        SloError: It is no number of milliseconds or tokens.
    """
    for key in GATEWAY_KEYS:
        value = xargs.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < MOST):
            raise SloError(f"'{key}' must be a finite number >= 0 (got {value!r:.100}).")


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise SloError(
            f"header '{name}' must be a finite number of milliseconds > 0 (got {text!r}); "
            f"leave it out to use the server's default."
        )
    return value
