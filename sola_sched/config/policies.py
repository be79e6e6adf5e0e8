"""Policies by name: the four of this package, those that others have installed, and single classes.

A policy is a class. It is built with the `SolaConfig`, its `plan(state)` decides one step, and its
`traits` say what it is and which options it reads. Three kinds of names lead to one:

- one of `BUILT_IN`,
- the name of an entry point in the group ``sola_sched.policies`` of any installed distribution,
- ``package.module:Class``, a class that can be imported.

The class is imported when its name is first asked for, so this module depends on no policy.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sola_sched.config import rules
from sola_sched.errors import ConfigError

GROUP = "sola_sched.policies"
#: Where the policies of this package are, below `sola_sched`.
BUILT_IN = {
    "attain": "planner.attain:AttainPlanner",
    "paper": "planner.paper:PaperPlanner",
    "alise": "planner.alise:AlisePlanner",
    "doubling": "planner.doubling:DoublingPlanner",
}


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """What a policy says of itself; the rest of the package asks this and never a name.

    Attributes:
        options: Options of `SolaConfig` that it reads, of `POLICY_OPTIONS`. A user who sets
            another one is told that it has no effect.
        goes_by_targets: It plans for targets. Then requests without any run in the engine's own
            order, and engines that take turns on a GPU go by their deadlines; else by the time
            that their requests take.
        gives_shares: It gives each class its guaranteed share (`Services.lifts`).
        serves_lost_last: Requests that can meet no target wait until all others are served, so
            that routers need not count them as being in the way.
    """

    options: tuple[str, ...] = ()
    goes_by_targets: bool = True
    gives_shares: bool = False
    serves_lost_last: bool = False


#: Options that are read by some policies only.
POLICY_OPTIONS = (
    "window", "levels", "aging_s", "best_effort_share", "safety", "tile", "overload",
    "max_wait_s", "policy_options",
)  # fmt: skip


def policy_class(name: Any) -> Any:
    """The class of a policy: ``policy_class(name)(config).plan(state)``.

    Raises:
        ConfigError: There is no such policy, or its class is not one.
    """
    if not isinstance(name, str):
        raise _unknown(name)
    return _load(name)


def traits_of(name: str) -> PolicyTraits:
    """What the policy says of itself; raises as `policy_class`."""
    traits: PolicyTraits = policy_class(name).traits
    return traits


def readers(option: str, policy: str) -> tuple[str, ...]:
    """Which of this package's policies, and whether `policy`, read an option."""
    names = dict.fromkeys((*BUILT_IN, policy))
    return tuple(name for name in names if option in traits_of(name).options)


def is_built_in(name: str) -> bool:
    """Whether it is one of this package's own."""
    return name in BUILT_IN


def installed() -> dict[str, EntryPoint]:
    """The entry points of other distributions, by name; names of `BUILT_IN` stay ours."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


@functools.cache
def _load(name: str) -> Any:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(f"sola_sched.{module}"), attribute)
    point = installed().get(name)
    module, _, attribute = name.partition(":")
    if point is None and module and attribute:
        point = EntryPoint(name=name, value=name, group=GROUP)
    if point is None:
        raise _unknown(name)
    try:
        found = point.load()
    except Exception as error:  # whatever the module raises as it is imported
        raise ConfigError(
            f"The class of 'policy' {name!r}, {point.value!r}, must be importable in every process "
            f"of the engine (got {type(error).__name__}: {error}); install its package, or put its "
            "folder on PYTHONPATH."
        ) from error
    _check_class(name, found)
    return found


def _check_class(name: str, found: Any) -> None:
    if not callable(getattr(found, "plan", None)):
        raise ConfigError(
            f"'policy' {name!r} must be a class with a method 'plan(state)' that returns a "
            f"StepPlan (got {found!r:.80})."
        )
    traits = getattr(found, "traits", None)
    if not isinstance(traits, PolicyTraits):
        raise ConfigError(
            f"'policy' {name!r} must have an attribute 'traits', a PolicyTraits "
            f"(got {traits!r:.80} of {found!r:.80}); write 'traits = PolicyTraits()' into it."
        )
    unknown = sorted(set(traits.options) - set(POLICY_OPTIONS))
    if unknown:
        raise ConfigError(
            f"The options of the traits of 'policy' {name!r} must be of "
            f"{', '.join(POLICY_OPTIONS)} (got {', '.join(map(repr, unknown))})."
        )


def _unknown(name: Any) -> ConfigError:
    names = [*BUILT_IN, *sorted(installed())]
    near = rules.nearest(name, names) if isinstance(name, str) else None
    meant = f" (meant: {near!r}?)" if near else ""
    return ConfigError(
        f"'policy' must be one of {', '.join(names)} (got {name!r}){meant}, or a class of yours as "
        "'package.module:Class'."
    )
