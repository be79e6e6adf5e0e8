"""The same minutes in virtual time: stock vLLM, ours as it was set, other targets, more of it.

Arrivals, prompts, true output lengths, targets and classes are those recorded; step times are the
engine's own cost model, as it had corrected itself by the end. What is not recorded: the text of
prompts, so no prefix is cached, and requests that ended without their whole answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sola_sched.bench.backends.base import SchedulerSpec
from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.config.slo import DEFAULT_CLASS, SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel
from sola_sched.errors import ConfigError
from sola_sched.explain.source import PATH, Window
from sola_sched.simulator.steps.profile import UNKNOWN_SHAPE, StepProfile
from sola_sched.simulator.steps.time import MeasuredStepTime
from sola_sched.workloads.workload import RequestSpec, Workload, random_token_ids

_WHOLE = ("attained", "missed")
_FEWEST = 2


@dataclass(frozen=True)
class Way:
    """One way to serve the recorded requests.

    Attributes:
        label: Shown in the table.
        kind: "stock" or "sola".
        ttft_s, tpot_s: Targets of all requests; None leaves theirs.
        engine_args: That differ from the recorded engine's.
        num_engines: Engines that get the requests of each recorded one in turn.
    """

    label: str
    kind: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    engine_args: Mapping[str, Any] | None = None
    num_engines: int = 1


@dataclass(frozen=True)
class _Part:
    """What one engine served: its facts, its step times and its requests."""

    engine: Mapping[str, Any]
    cost: CostModel
    specs: Sequence[RequestSpec]


class Replay:
    """The recorded requests of a window, ready to be served again.

    Attributes:
        num_left_out: Requests without a whole answer.

    Raises:
        ConfigError: The window holds no engine, or one that is none, or too few requests.
    """

    def __init__(self, window: Window) -> None:
        rng = np.random.default_rng(0)
        self._parts: list[_Part] = []
        for rank, own in (window.by_engine or {0: window}).items():
            whole = [fate for fate in own.requests if fate["end"] in _WHOLE and fate["num_output"]]
            if not whole and len(window.by_engine) > 1:
                continue
            if own.engine is None:
                raise ConfigError(
                    "a replay needs the engine's settings and step times, which the server has "
                    f"not told{f' of engine {rank}' if len(window.by_engine) > 1 else ''} (its "
                    "cost model is still learning, or the file is of an older release)."
                )
            if whole:
                self._parts.append(_Part(own.engine, _cost(own.engine), _specs(whole, rng)))
        num_whole = self.num_requests
        self.num_left_out = len(window.requests) - num_whole
        if num_whole < _FEWEST:
            raise ConfigError(
                f"a replay needs at least {_FEWEST} requests with whole answers (got {num_whole})."
            )

    def id_of(self, part: str) -> str:
        """The id of the first request whose id contains this.

        Raises:
            ConfigError: None of those that are served again has.
        """
        for spec in self._all():
            if part in spec.req_id:
                return spec.req_id
        raise ConfigError(
            f"'ID' must be that of a recorded request with a whole answer (none has {part!r})."
        )

    @property
    def num_engines(self) -> int:
        """Engines of the server that had some of them."""
        return len(self._parts)

    @property
    def num_requests(self) -> int:
        """Requests that are served again."""
        return len(self._all())

    def _all(self) -> list[RequestSpec]:
        return [spec for part in self._parts for spec in part.specs]

    def run(self, way: Way) -> list[RequestRecord]:
        """Serve them so; a record for each, in the order of their arrival.

        Each engine of the server is served again by itself, from its own first arrival on.
        """
        records: list[RequestRecord] = []
        for part in self._parts:
            specs = [self._with_targets(spec, way) for spec in part.specs]
            for number in range(way.num_engines):
                own = specs[number :: way.num_engines]
                if own:
                    records += self._served(part, own, way)
        return sorted(records, key=lambda record: record.arrival_s)

    def _served(self, part: _Part, specs: Sequence[RequestSpec], way: Way) -> list[RequestRecord]:
        args = {**part.engine["engine_args"], **(way.engine_args or {})}
        profile = StepProfile("recorded", MeasuredStepTime(part.cost), UNKNOWN_SHAPE)
        backend = SimBackend(SimOptions(profile, args, num_warmups=0))
        options = dict(part.engine["options"]) if way.kind == "sola" else {}
        scheduler = SchedulerSpec(way.label, way.kind, {}, options)
        return list(backend.run(Workload(tuple(specs)), scheduler, SloTarget()).records)

    def _with_targets(self, spec: RequestSpec, way: Way) -> RequestSpec:
        slo = spec.slo or SloTarget()
        if way.ttft_s is not None:
            slo = replace(slo, ttft_s=way.ttft_s)
        if way.tpot_s is not None:
            slo = replace(slo, tpot_s=way.tpot_s)
        return replace(spec, slo=slo)


def _specs(whole: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> list[RequestSpec]:
    """The requests of one engine in the order of their arrivals, the first at 0."""
    ordered = sorted(whole, key=lambda fate: float(fate["arrival_s"]))
    return [
        RequestSpec(
            req_id=fate["request_id"],
            prompt_token_ids=random_token_ids(rng, fate["num_prompt"], UNKNOWN_SHAPE["vocab_size"]),
            output_tokens=fate["num_output"],
            arrival_s=fate["arrival_s"] - ordered[0]["arrival_s"],
            slo=SloTarget(*(_or_inf(fate[name]) for name in ("ttft_s", "tpot_s", "e2e_s"))),
            slo_class=None if fate["slo_class"] == DEFAULT_CLASS else fate["slo_class"],
            priority=fate["priority"],
        )
        for fate in ordered
    ]


def table(lines: Sequence[Sequence[str]]) -> str:
    """What `cells` says, as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def cells(
    replayed: Mapping[str, Sequence[RequestRecord]], req_id: str | None = None
) -> list[list[str]]:
    """A head and a row for each way; with an id, the latencies of this request as well."""
    head = ["way", "in time", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    if req_id is not None:
        head += ["its TTFT", "its TPOT"]
    lines = [head]
    for label, records in replayed.items():
        ttft = np.array([record.ttft_s for record in records])
        tpot = np.array([record.tpot_s for record in records])
        attained = sum(record.attains(SloTarget()) for record in records) / len(records)
        row = [label, f"{attained:.1%}"]
        for times in (ttft, tpot):
            known = times[np.isfinite(times)]
            row += [_ms(float(np.percentile(known, q))) if len(known) else "-" for q in (50, 99)]
        if req_id is not None:
            own = next(record for record in records if record.req_id == req_id)
            row += [_ms(own.ttft_s), _ms(own.tpot_s)]
        lines.append(row)
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if math.isfinite(seconds) else "-"


def _cost(engine: Mapping[str, Any]) -> CostModel:
    """The engine's cost model, the correction of each kind of step in its coefficients.

    Mixed steps have a correction of their own, which there is no coefficient for: they are taken
    to be as far off as the two kinds that they are made of.
    """
    try:
        prefill, decode = (float(engine["gamma"][kind]) for kind in ("prefill", "decode"))
        own = {name: float(value) for name, value in engine["coefficients"].items()}
        scaled = {name: own[name] * prefill for name in ("a0", "b0", "c0", "d0")}
        scaled |= {name: own[name] * decode for name in ("a1", "b1", "c1")}
        scaled["overlap"] = min(own["overlap"] * min(prefill, decode), scaled["d0"], scaled["c1"])
        for name in ("engine_args", "options"):
            dict(engine[name])
        return CostModel.from_coefficients(Coefficients(**scaled))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a replay needs the engine's settings and step times as {PATH} tells them "
            f"({type(error).__name__}: {error})."
        ) from error


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else float(value)
