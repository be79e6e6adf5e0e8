"""The operator's options, validated when they are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sola_sched.config import rules, services
from sola_sched.config.policies import POLICY_OPTIONS, PolicyTraits, readers, traits_of
from sola_sched.config.slo import DEFAULT_CLASS, TARGETS, SloTarget
from sola_sched.config.swap import SwapConfig
from sola_sched.config.turns import TurnsConfig
from sola_sched.errors import ConfigError, SloError

#: The one key under ``--additional-config`` that belongs to this package.
CONFIG_KEY = "sola_sched"
#: Times of a class, null for none.
_SECONDS = (*TARGETS, "max_wait_s")
_OF_CLASS = (*_SECONDS, "weight", services.SHARE_KEY)
PREDICTORS = ("histogram", "lexical", "retrieval")
OVERLOAD_MODES = ("defer", "reject")
#: Options that only some values of another option use; what each policy reads, its traits say.
USED_BY = {
    "predictor_path": ("predictor", ("lexical", "retrieval")),
    "predictor_save_s": ("predictor", ("lexical", "retrieval")),
    "predictor_encoder": ("predictor", ("retrieval",)),
}


@dataclass(frozen=True)
class SolaConfig:
    """Options of ``sola_sched.Scheduler``.

    Attributes:
        policy: ``attain`` maximizes the number of requests that meet all SLOs; ``paper`` is
            SOLA as published; ``alise`` serves the shortest remaining time first, SLOs aside;
            ``doubling`` is SeaLLM: those whose services take little time first, SLOs aside. Others
            by the name of an installed policy, or as ``package.module:Class``; see `policies`.
        ttft_s: Default TTFT target, seconds; None disables it. The default of 2 s (and of 0.1 s
            for TPOT) is the server target of MLPerf Inference for an 8B chat model.
        tpot_s: Default TPOT target, seconds; None disables it.
        e2e_s: Default target for the time to the last token, seconds; None disables it.
        classes: SLO classes by name, each ``{"ttft_s": ..., "tpot_s": ..., "e2e_s": ...,
            "weight": ...}``.
        shares: Guaranteed shares of the engine time by the name of the class, which has it as
            ``"share"`` among its options: in (0, 1), in sum with `best_effort_share` at most 1.
            What a class does not ask for is lent.
        overload: What happens to a waiting request that can no longer meet its SLO: ``defer``
            serves it from the best-effort share, ``reject`` ends it at once with an error.
        max_wait_s: Seconds after which a waiting request that misses its targets anyway is served
            next, or refused with ``overload`` ``reject``, > 0; None for never. A class may have its
            own.
        best_effort_share: Share of engine time, in [0, 1), kept for requests that have lost
            their SLO while others can still meet theirs; the oldest of them is always next.
        tile: Prefill chunks are multiples of this many tokens (SOLA 4.4.3); ``attain`` rounds
            chunks of fewer than eight tiles less coarsely.
        alpha: Confidence of one measured step in the online correction, in (0, 1] (SOLA Eq. 5).
        window: Steps of the sliding window that damps switching between the two problems of
            SOLA Table 2, >= 1.
        levels: Priority levels of ``alise``, >= 1; each holds requests of up to twice the
            remaining time of the one before.
        aging_s: Seconds without service that lift a request by one level of ``alise``, > 0; None
            for no aging. A request of the last level waits for at most ``levels - 1`` times as
            long before none that comes later can pass it. With ``doubling``: that put it first.
        safety: Share of each latency target kept as a margin for mispredicted steps, in [0, 1).
        policy_options: What a policy of others reads, by name.
        profile: Cost-model file written by ``python -m sola_sched.profile``; None learns the
            cost model from live steps.
        predictor: What output lengths are predicted from: ``histogram`` of finished requests;
            ``lexical``, the words of the prompt; ``retrieval``, similar past prompts as well. The
            last two run in a process of their own and fall back to the histogram, also while they
            are much worse than it.
        predictor_path: File of ``python -m sola_sched.length_predictor build``; None starts from
            nothing and learns.
        predictor_save_s: Seconds between two writes of what was learned to ``predictor_path``; 0
            never writes.
        predictor_encoder: Sentence encoder of ``retrieval``, a name or folder; None is the
            default one.
        steer: Whether steps follow the plans. If not, vLLM's own order runs, and plans are made
            and counted only.
        log_interval_s: Seconds between two summary lines in the log; 0 disables them.
        log_missed: Lines in the log a minute, at most, that say why a request was late.
        load_interval_s: Seconds between two reports of the load to routers, which a server of one
            engine streams at ``/sola/load``, > 0; None for none.
        plan_limit_s: Processor time that one plan may take, seconds, > 0; after repeated
            longer ones planning pauses, in vLLM's own order. None for no limit.
        options_file: JSON file of options that replace these whenever it changes; see
            `LiveOptions`. None for none.
        swap: What happens to the KV of preempted requests; see `SwapConfig`.
        turns: How the GPU is shared with other engines; see `TurnsConfig`. None for no sharing.
    """

    policy: str = "attain"
    ttft_s: float | None = 2.0
    tpot_s: float | None = 0.1
    e2e_s: float | None = None
    classes: Mapping[str, SloTarget] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict, metadata={"is_option": False})
    overload: str = "defer"
    max_wait_s: float | None = None
    best_effort_share: float = 0.02
    tile: int = 128
    alpha: float = 0.1
    window: int = 8
    levels: int = 8
    aging_s: float | None = 300.0
    safety: float = 0.05
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None
    predictor: str = "histogram"
    predictor_path: str | None = None
    predictor_save_s: float = 0.0
    predictor_encoder: str | None = None
    steer: bool = True
    log_interval_s: float = 10.0
    log_missed: int = 0
    load_interval_s: float | None = None
    plan_limit_s: float | None = 0.1
    options_file: str | None = None
    swap: SwapConfig = field(default_factory=SwapConfig)
    turns: TurnsConfig | None = None

    def __post_init__(self) -> None:
        traits = traits_of(self.policy)
        if not isinstance(self.policy_options, Mapping):
            raise ConfigError(
                f"'policy_options' must be an object of options (got {self.policy_options!r})."
            )
        rules.one_of("overload", self.overload, OVERLOAD_MODES)
        for name in (*TARGETS, "max_wait_s"):
            value = getattr(self, name)
            if value is not None:
                rules.number(name, value, low=0.0, low_open=True, hint="use null to disable it")
        try:
            _ = self.default_slo
        except SloError as error:
            raise ConfigError(str(error)) from error
        rules.number("best_effort_share", self.best_effort_share, low=0.0, high=1.0, high_open=True)
        rules.number("alpha", self.alpha, low=0.0, low_open=True, high=1.0)
        rules.number("safety", self.safety, low=0.0, high=1.0, high_open=True)
        rules.number("log_interval_s", self.log_interval_s, low=0.0)
        rules.number("log_missed", self.log_missed, low=0.0)
        rules.flag("steer", self.steer)
        for name in ("aging_s", "plan_limit_s", "load_interval_s"):
            value = getattr(self, name)
            if value is not None:
                rules.number(name, value, low=0.0, low_open=True, hint="use null to disable it")
        for name in ("tile", "window", "levels"):
            rules.count(name, getattr(self, name))
        services.check_shares(
            self.shares, self.classes, traits, self.policy, self.best_effort_share
        )
        for name in ("profile", "predictor_path", "predictor_encoder", "options_file"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | Path):
                raise ConfigError(f"'{name}' must be a path or null (got {value!r}).")
            if value is not None:  # no shell has done so within JSON
                object.__setattr__(self, name, type(value)(os.path.expanduser(value)))
        rules.one_of("predictor", self.predictor, PREDICTORS)
        rules.number("predictor_save_s", self.predictor_save_s, low=0.0)
        if self.predictor_save_s and self.predictor_path is None:
            raise ConfigError(
                f"'predictor_save_s' {self.predictor_save_s!r} needs 'predictor_path', the file "
                "that is written."
            )

    @property
    def traits(self) -> PolicyTraits:
        """What the policy says of itself."""
        return traits_of(self.policy)

    @property
    def default_slo(self) -> SloTarget:
        """The targets of a request that names none."""
        return SloTarget(
            ttft_s=math.inf if self.ttft_s is None else float(self.ttft_s),
            tpot_s=math.inf if self.tpot_s is None else float(self.tpot_s),
            e2e_s=math.inf if self.e2e_s is None else float(self.e2e_s),
            max_wait_s=math.inf if self.max_wait_s is None else float(self.max_wait_s),
        )

    @property
    def aging_seconds(self) -> float:
        """`aging_s` with ``inf`` for None."""
        return math.inf if self.aging_s is None else float(self.aging_s)

    @classmethod
    def from_additional(cls, additional: Any) -> SolaConfig:
        """Build a configuration from the whole of ``--additional-config``.

        Args:
            additional: vLLM's; keys that are nothing like ours belong to other plug-ins.

        Raises:
            ConfigError: Something meant for us stands beside our key, or as `from_mapping`.
        """
        if not isinstance(additional, Mapping):
            return cls()
        _refuse_misplaced(additional)
        return cls.from_mapping(additional.get(CONFIG_KEY))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> SolaConfig:
        """Build a configuration from plain data, e.g. the JSON of ``--additional-config``.

        Raises:
            ConfigError: An option is unknown, breaks its rule or would have no effect.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"'{CONFIG_KEY}' must be an object of options (got {options!r}); "
                f'e.g. {{"{CONFIG_KEY}": {{"ttft_s": 0.5, "tpot_s": 0.05}}}}.'
            )
        rules.known(cls, options, CONFIG_KEY)
        values = dict(options)
        if "classes" in values:
            rest, values["shares"] = services.take_shares(values["classes"])
            values["classes"] = _classes(rest, values.get("max_wait_s"))
        if "swap" in values:
            values["swap"] = SwapConfig.from_mapping(values["swap"])
        if values.get("turns") is not None:
            values["turns"] = TurnsConfig.from_mapping(values["turns"])
        config = cls(**values)
        config._refuse_unused(options)
        return config

    def _refuse_unused(self, names: Iterable[str]) -> None:
        defaults = type(self)()
        for name in names:
            if name in POLICY_OPTIONS:
                by, values = "policy", readers(name, self.policy)
            else:
                by, values = USED_BY.get(name, ("", ()))
            if not by or getattr(self, by) in values:
                continue
            if getattr(self, name) != getattr(defaults, name):
                known = " or ".join(map(repr, values)) or "a class that reads it"
                raise ConfigError(
                    f"'{name}' has an effect with '{by}' {known} only "
                    f"(got '{name}' {getattr(self, name)!r} with '{by}' {getattr(self, by)!r}); "
                    f"set '{by}', or leave '{name}' out."
                )


def _refuse_misplaced(additional: Mapping[Any, Any]) -> None:
    """Refuse keys of ``--additional-config`` that were meant for us and would be ignored."""
    options = {rules.plain(name): name for name in rules.option_names(SolaConfig)}
    for key in additional:
        if not isinstance(key, str) or key == CONFIG_KEY:
            continue
        first_word = re.split(r"[^a-z0-9]", key.lower())[0]
        if first_word == "sola" or rules.nearest(key, [CONFIG_KEY]):
            raise ConfigError(
                f"The options in --additional-config must be under '{CONFIG_KEY}' (got {key!r}, "
                f'which nothing reads); write {{"{CONFIG_KEY}": {{...}}}}.'
            )
        name = options.get(rules.plain(key))
        # A single word may well be another plug-in's, where ours are in their place.
        if name is not None and ("_" in name or CONFIG_KEY not in additional):
            raise ConfigError(
                f"'{name}' must be under '{CONFIG_KEY}' in --additional-config (got {key!r} beside "
                f'it, where nothing reads it); write {{"{CONFIG_KEY}": {{"{name}": ...}}}}.'
            )


def _classes(raw: Any, max_wait_s: Any) -> dict[str, SloTarget]:
    """The classes; one without a `max_wait_s` of its own has this one."""
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"'classes' must map names to targets (got {raw!r}); "
            'e.g. {"chat": {"ttft_s": 0.5, "tpot_s": 0.05}}.'
        )
    classes = {}
    for name, targets in raw.items():
        if name == DEFAULT_CLASS:
            raise ConfigError(
                f"No SLO class may be named {DEFAULT_CLASS!r}, as requests without a class are; "
                "give it another name, or set 'ttft_s' and the others for those."
            )
        if isinstance(targets, SloTarget):
            classes[name] = targets
            continue
        if not isinstance(targets, Mapping):
            raise ConfigError(
                f"SLO class {name!r} must be an object with 'ttft_s', 'tpot_s', 'e2e_s', "
                f"'max_wait_s', 'weight' and 'share', each only if wanted (got {targets!r})."
            )
        rules.known_names(_OF_CLASS, targets, f"SLO class {name!r}")
        targets = {"max_wait_s": max_wait_s, **targets}
        values = {k: math.inf if v is None and k in _SECONDS else v for k, v in targets.items()}
        try:
            classes[name] = SloTarget(**values)
        except SloError as error:
            raise ConfigError(f"SLO class {name!r}: {error}") from error
    return classes
