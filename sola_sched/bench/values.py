"""Parses the values of command-line flags; every error says what is allowed and what was given."""

from __future__ import annotations

import math

from sola_sched.bench.report.results import METRIC_NAMES
from sola_sched.config.slo import DEFAULT_CLASS, NO_TARGET, TARGETS, SloTarget
from sola_sched.errors import ConfigError, SloError
from sola_sched.workloads.workload import SloClass


def parse_slo(items: list[str]) -> SloTarget:
    """Parse ``["ttft:500", "tpot:50", "e2e:9000"]``, milliseconds; what is left out is unlimited.

    ``e2el``, as vLLM calls the time to the last token, is ``e2e``.
    """
    targets: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        name = "e2e" if name == "e2el" else name
        if f"{name}_s" not in TARGETS or f"{name}_s" in targets:
            hint = item.replace("=", ":", 1) if "=" in item else "ttft:1000"
            raise ConfigError(
                f"'--slo' takes ttft:<ms>, tpot:<ms> and e2e:<ms>, each once (got {item!r}); "
                f"write for example {hint}."
            )
        targets[f"{name}_s"] = positive_number(value, f"--slo {item}") / 1e3
    return _target("--slo", **targets)


def _target(flag: str, **values: float) -> SloTarget:
    try:
        return SloTarget(**values)
    except SloError as error:
        raise ConfigError(f"'{flag}': {error}") from error


def parse_slo_class(text: str) -> SloClass:
    """Parse ``name:share:ttft_ms:tpot_ms[:e2e_ms[:weight]]``; ``none`` stands for no target."""
    name, *parts = text.split(":")
    if not 3 <= len(parts) <= 5 or not name:
        raise ConfigError(
            f"'--slo-class' takes NAME:SHARE:TTFT_MS:TPOT_MS[:E2E_MS[:WEIGHT]] (got {text!r}); "
            "e.g. chat:0.7:500:50 or job:0.3:none:none:60000:2."
        )
    if name == DEFAULT_CLASS:
        raise ConfigError(
            f"'--slo-class' must not be called {DEFAULT_CLASS!r}, as requests without a class are "
            f"(got {text!r}); name it otherwise."
        )
    flag = f"--slo-class {text}"
    targets_s = [
        math.inf if part == NO_TARGET else positive_number(part, flag) / 1e3 for part in parts[1:4]
    ]
    weight = positive_number(parts[4], flag) if len(parts) == 5 else 1.0
    slo = _target(flag, **dict(zip(TARGETS, targets_s, strict=False)), weight=weight)
    return SloClass(name, positive_number(parts[0], flag), slo)


def parse_slo_classes(texts: list[str]) -> list[SloClass]:
    """`parse_slo_class` of each; no name may come twice."""
    classes = [parse_slo_class(text) for text in texts]
    names = [each.name for each in classes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"'--slo-class' must name each class once (got {name!r} {names.count(name)} "
                "times); give each a name of its own."
            )
    return classes


def parse_pairs(items: list[str], flag: str) -> dict[str, str]:
    """Parse ``["key=value", ...]``, each key once."""
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{flag}' takes KEY=VALUE pairs (got {item!r}).")
        if key.strip() in pairs:
            raise ConfigError(f"'{flag}' takes each key once (got {key.strip()!r} again).")
        pairs[key.strip()] = value.strip()
    return pairs


def parse_percentiles(text: str) -> list[float]:
    """Parse ``"50,99"``; each in [0, 100]."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"'--metric-percentiles' takes numbers in [0, 100] (got {text!r}).")
    return values


def parse_metric_names(text: str) -> list[str]:
    """Parse ``"ttft,tpot"``; each one of ``METRIC_NAMES``."""
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in METRIC_NAMES]
    if unknown:
        raise ConfigError(
            f"'--percentile-metrics' takes {', '.join(METRIC_NAMES)} (got {', '.join(unknown)})."
        )
    return names


def positive_number(text: str, what: str) -> float:
    """A finite number > 0; `what` names it in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"'{what}' must hold finite numbers > 0 (got {text!r}).")
    return value
