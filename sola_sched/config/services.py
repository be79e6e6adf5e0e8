"""Guaranteed shares of the engine time, which an operator sets with the SLO classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sola_sched.config import rules
from sola_sched.config.policies import BUILT_IN, PolicyTraits, traits_of
from sola_sched.errors import ConfigError

#: Key of a class.
SHARE_KEY = "share"


def take_shares(classes: Any) -> tuple[Any, dict[str, float]]:
    """The classes as they are without their shares, and those that have one.

    Args:
        classes: The option, of any form; a wrong one is somebody else's to refuse.
    """
    if not isinstance(classes, Mapping):
        return classes, {}
    rest, shares = dict(classes), {}
    for name, settings in classes.items():
        if isinstance(settings, Mapping) and SHARE_KEY in settings:
            rest[name] = {key: value for key, value in settings.items() if key != SHARE_KEY}
            if settings[SHARE_KEY] is not None:
                shares[name] = settings[SHARE_KEY]
    return rest, shares


def check_shares(
    shares: Mapping[str, Any],
    names: Collection[str],
    traits: PolicyTraits,
    policy: str,
    best_effort_share: float,
) -> None:
    """Refuse shares that cannot be kept.

    Args:
        shares: By name.
        names: Of all classes.
        traits: Of the policy.
        policy, best_effort_share: The options.

    Raises:
        ConfigError: One is no share, is nobody's, or has no effect; or they leave too little.
    """
    for name, share in shares.items():
        rules.number(
            f"{SHARE_KEY}' of class '{name}", share, low=0.0, low_open=True, high=1.0,
            high_open=True, hint="it is a part of the engine time; leave it out for none",
        )  # fmt: skip
        if name not in names:
            raise ConfigError(
                f"A share must be that of a configured class (got {name!r}; known: "
                f"{', '.join(sorted(names)) or 'none'})."
            )
    if shares and not traits.gives_shares:
        sharing = [name for name in BUILT_IN if traits_of(name).gives_shares]
        raise ConfigError(
            f"'{SHARE_KEY}' has an effect with 'policy' "
            f"{' or '.join(map(repr, sharing))} only (got 'policy' {policy!r}); set "
            f"'policy', or leave '{SHARE_KEY}' out."
        )
    most = 1.0 - (best_effort_share if "best_effort_share" in traits.options else 0.0)
    if sum(shares.values()) > most + 1e-9 or sum(shares.values()) >= 1.0:
        raise ConfigError(
            f"The shares of all classes must be below 1 in sum, with 'best_effort_share' at most 1 "
            f"(got {sum(shares.values()):g}, and {1.0 - most:g}); lower some of them."
        )
