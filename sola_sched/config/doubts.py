"""Targets that keep their rules and can hardly be meant: milliseconds in the place of seconds."""

from __future__ import annotations

import math

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig

#: From here on a target is doubted, seconds.
_MOST_S = {"ttft_s": 100.0, "tpot_s": 5.0}


def doubts(config: SolaConfig) -> list[str]:
    """A sentence for each target that was probably meant to be milliseconds."""
    found = _of("", config.default_slo)
    for name, target in config.classes.items():
        found += _of(f" of class {name!r}", target)
    return found


def _of(whose: str, target: SloTarget) -> list[str]:
    found = []
    for name, most_s in _MOST_S.items():
        seconds = getattr(target, name)
        if most_s <= seconds < math.inf:
            found.append(
                f"'{name}'{whose} is {seconds:g} seconds, which is taken as it is; for {seconds:g} "
                f"milliseconds write {seconds / 1e3:g}, and null for no target."
            )
    return found
