"""Services as they are described: keys and values to `Service`s, and arrivals made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sola_sched.bench.values import positive_number
from sola_sched.cluster.sharing.services import Service
from sola_sched.config.rules import nearest
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.simulator.sharing.cluster import Arrival, Setting
from sola_sched.simulator.sharing.hardware import model_of

_NUMBERS = ("rate", "ttft", "tpot", "prompt", "output")
KEYS = ("name", "model", *_NUMBERS)
#: What the placement decides of an engine.
_PLACED = ("tensor_parallel_size", "gpu_memory_utilization", "served_model_name")
#: With these the limit of a model may be another than the published weights have.
_OTHER_WEIGHTS = ("model", "hf_overrides")
#: Of an engine: these are simulated as they are given, and what they are otherwise.
_LIMITS = {
    "max_num_seqs": Setting.max_num_seqs,
    "max_num_batched_tokens": Setting.max_num_batched_tokens,
}
#: Least of each number, and most: beyond them it is a slip, and a float may not hold what is made
#: of it. Of a second, milliseconds, tokens.
_LEAST = 1e-9
_MOST = {"rate": 1e12, "ttft": 1e12, "tpot": 1e12, "prompt": 1e7, "output": 1e7}
_DEFAULTS = {"prompt": 500.0, "output": 250.0}
#: Lengths are lognormal around their medians.
LENGTH_STD = 0.7
_NUM_LENGTHS = 400
_SPAN_S = 60.0
#: Of the minute that is planned for.
_MOST_REQUESTS = 200_000


def parse_service(text: str) -> dict[str, Any]:
    """Parse ``name=chat,model=llama-3-8b,rate=5,ttft=800,tpot=60``.

    Raises:
        ConfigError: A part is no KEY=VALUE.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, sign, value = part.partition("=")
        if not sign or key in found:
            raise ConfigError(
                f"'--service' takes KEY=VALUE,... with each key once (got {part!r} in {text!r}); "
                "write for example name=chat,model=llama-3-8b,rate=5,ttft=800,tpot=60."
            )
        found[key] = value
    return found


def make_service(given: Mapping[str, Any], seed: int) -> Service:
    """A service of its keys; times in milliseconds, lengths in tokens.

    Beside `KEYS` it may have `engine`, an object: arguments of `vllm serve` for its engines.

    Raises:
        ConfigError: A key is unknown or missing, or a value breaks its rule.
    """
    unknown = sorted(set(given) - {*KEYS, "engine"})
    if unknown:
        near = nearest(unknown[0], (*KEYS, "engine"))
        raise ConfigError(
            f"a service takes the keys {', '.join(KEYS)}, engine (got {unknown[0]!r}"
            f"{f'; write {near!r}' if near else ''})."
        )
    missing = [key for key in ("name", "model", "rate") if key not in given]
    if missing:
        raise ConfigError(f"a service must have {missing[0]!r} (got {dict(given)!r}).")
    name = str(given["name"])
    model_of(str(given["model"]))
    numbers = {key: _number(name, key, given[key]) for key in _NUMBERS if key in given}
    if "ttft" not in numbers and "tpot" not in numbers:
        raise ConfigError(f"service {name!r} must have a target: ttft or tpot, in ms (got none).")
    rng = np.random.default_rng([seed, sum(name.encode(errors="replace"))])
    columns = [
        np.exp(rng.normal(math.log(numbers.get(key, value)), LENGTH_STD, _NUM_LENGTHS))
        for key, value in _DEFAULTS.items()
    ]
    engine = _engine(name, given.get("engine", {}))
    most = most_tokens(str(given["model"]), engine)
    if numbers.get("prompt", _DEFAULTS["prompt"]) >= most:
        raise ConfigError(
            f"'prompt' of service {name} must be below {most:,} tokens, which an engine takes at "
            f"most of {given['model']} (got {numbers.get('prompt', _DEFAULTS['prompt']):,.0f}): it "
            "refuses half of the requests."
        )
    lengths = [
        (max(1, round(prompt)), max(1, min(round(output), most - round(prompt))))
        for prompt, output in zip(*columns, strict=True)
        if round(prompt) < most
    ]
    refused = 1.0 - len(lengths) / _NUM_LENGTHS
    slo = SloTarget(
        ttft_s=numbers.get("ttft", math.inf) / 1e3, tpot_s=numbers.get("tpot", math.inf) / 1e3
    )
    return Service(
        name, str(given["model"]), numbers["rate"], lengths, slo, engine=engine, refused=refused
    )


def most_tokens(model: str, engine: Mapping[str, Any]) -> int:
    """Prompt and output tokens that an engine takes at most: vLLM's `max_model_len`."""
    own, given = model_of(model).max_model_len, engine.get("max_model_len")
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        return own  # also what vLLM finds by itself is no more
    return given if set(engine) & set(_OTHER_WEIGHTS) else min(own, given)


def _number(name: str, key: str, given: Any) -> float:
    value = positive_number(str(given), f"{key} of service {name}")
    if not _LEAST <= value <= _MOST[key]:
        raise ConfigError(
            f"{key!r} of service {name} must be from {_LEAST:g} to {_MOST[key]:g} (got {value:g})."
        )
    return value


def _engine(name: str, given: Any) -> dict[str, Any]:
    """Arguments of the service's engines, by the names that `vllm serve` has with underscores."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"'engine' of service {name} must be an object, in a file of services (got {given!r})."
        )
    found = {str(key).replace("-", "_"): value for key, value in given.items()}
    placed = [key for key in _PLACED if key in found]
    if placed:
        raise ConfigError(
            f"'engine' of service {name} must leave {', '.join(_PLACED)} to the placement "
            f"(got {placed[0]!r})."
        )
    additional = found.get("additional_config", {})
    sola = additional.get("sola_sched", {}) if isinstance(additional, Mapping) else None
    if not isinstance(sola, Mapping):
        raise ConfigError(
            f"'additional_config' in 'engine' of service {name} must be an object, and "
            f"'sola_sched' in it (got {additional!r})."
        )
    for key in _LIMITS:
        value = found.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{key!r} in 'engine' of service {name} must be a whole number >= 1 "
                f"(got {value!r})."
            )
    slots, tokens = (found.get(key, default) for key, default in _LIMITS.items())
    if tokens < slots:
        raise ConfigError(
            f"'max_num_batched_tokens' in 'engine' of service {name} must be >= its 'max_num_seqs' "
            f"(got {tokens} < {slots}{'' if 'max_num_seqs' in found else ', the default'}); vLLM "
            "does not start otherwise."
        )
    ours = [key for key in ("ttft_s", "tpot_s", "turns") if key in sola]
    if ours:
        raise ConfigError(
            f"'sola_sched' in 'engine' of service {name} must not have ttft_s, tpot_s or turns "
            f"(got {ours[0]!r}); give 'ttft' and 'tpot' of the service."
        )
    return found


def make_arrivals(services: Sequence[Service], seed: int) -> list[Arrival]:
    """Poisson arrivals of a minute, at least one of each service; those that are refused too.

    Raises:
        ConfigError: They are too many to be tried.
    """
    wanted = _SPAN_S * sum(service.rate for service in services)
    if wanted > _MOST_REQUESTS:
        raise ConfigError(
            f"'rate' of all services must give at most {_MOST_REQUESTS:,} requests a minute (got "
            f"{wanted:,.0f}); plan for a part of them."
        )
    rng = np.random.default_rng([seed, 23])
    made: list[Arrival] = []
    for service in services:
        num = max(1, int(rng.poisson(service.rate * _SPAN_S)))
        for at_s in np.sort(rng.uniform(0.0, _SPAN_S, num)):
            is_refused = service.refused > 0.0 and rng.random() < service.refused
            lengths = service.lengths[int(rng.integers(len(service.lengths)))]
            made.append((float(at_s), service.name, *((0, 0) if is_refused else lengths)))
    return sorted(made)
