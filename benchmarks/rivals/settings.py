"""The published schedulers by name, with the settings that are swept.

Values as published are in each grid, and those around which each attained most in virtual time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """One scheduler.

    Attributes:
        path: Its class.
        grid: Values of its options; every combination is a setting.
        more: Further settings.
        serves_all: Whether it refuses nobody.
        specs_of: Settings that are no policy of this folder, as of `sola_sched.bench`.
    """

    path: str = ""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    more: Sequence[Mapping[str, Any]] = ()
    serves_all: bool = True
    specs_of: Sequence[str] = ()

    @property
    def rule(self) -> str:
        """The name of its class."""
        return self.path.rpartition(":")[2]

    def specs(self, **options: Any) -> list[str]:
        """Its settings as `sola_sched.bench` reads them, each with some more options."""
        if self.specs_of:
            return list(self.specs_of)
        swept = [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]
        return [self._spec(dict(setting) | options) for setting in (*swept, *self.more)]

    def _spec(self, options: Mapping[str, Any]) -> str:
        told = "".join(f",policy_options.{name}={value}" for name, value in options.items())
        return f"sola:policy={self.path},plan_limit_s=none{told}"


def short(spec: str) -> str:
    """A setting without what all of a scheduler's settings share."""
    kind, _, rest = spec.partition(":")
    told = [part.removeprefix("policy_options.") for part in rest.split(",")]
    swept = [part for part in told if not part.startswith(("policy=", "plan_limit_s="))]
    return " ".join(swept) or kind


CHUNKS = (512, 1024, 2048)
_AS_PUBLISHED = {"alpha": 0.008, "margin": 1.2, "grid": True, "clock": "published"}
RIVALS = {
    "QoServe": Published(
        "rivals.qoserve:QoServe",
        {"alpha": (0.0005, 0.001, 0.002, 0.004), "margin": (1.0, 1.1)},
        (_AS_PUBLISHED, _AS_PUBLISHED | {"clock": "actual"}),
    ),
    "SLOs-Serve": Published("rivals.slos_serve:SlosServe", {"k": (0.2, 0.3, 0.4, 0.6, 1.0)}),
    "ProServe": Published(
        "rivals.proserve:SlideBatching", {"lam": (0.8, 1.0), "floor": (0.65, 0.9)}
    ),
    "SCORPIO": Published(
        "rivals.scorpio:Scorpio",
        {"gate": (0.8, 1.0, 1.3), "chunk": (0, 512, 1024)},
        serves_all=False,
    ),
    "SCORPIO, all served": Published(
        "rivals.scorpio:Scorpio", {"gate": (1.0, 1.3), "chunk": (0, 512), "refuse": (False,)}
    ),
    "FairBatching": Published(
        "rivals.fairbatching:FairBatching",
        {"margin": (1.0, 1.2)},
        ({"hopeless_last": False}, {"clock": "published"}),
    ),
    "SLAI": Published("rivals.slai:Slai", {"chunk": CHUNKS, "k": (2, 5)}),
    "SlidingServe": Published("rivals.slidingserve:SlidingServe", {"margin": (1.0, 1.1, 1.2)}),
    "EDF": Published("rivals.simple:Edf", {"chunk": (*CHUNKS, 4096)}),
    "TPOT budget": Published("rivals.simple:TpotBudget", {"share": (0.5, 0.7, 0.9, 1.0)}),
    "shortest prompt": Published(specs_of=tuple(f"spf:{chunk}" for chunk in CHUNKS)),
    "Past-Future": Published("rivals.simple:PastFuture", {"chunk": CHUNKS}),
}
"""By name; the last but one is a rule of the simulator."""
