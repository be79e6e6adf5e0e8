"""Ray Serve's autoscaling of a group of engines: its configuration, looked over and completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from sola_sched.errors import ConfigError
from sola_sched.serving.scaling import ScalingPolicy

SCALING_POLICY = f"{ScalingPolicy.__module__}:{ScalingPolicy.__qualname__}"
#: Heartbeats back that a replica's report reaches.
_REPORTED = 10
#: Reports of two replicas, and the counts within them, may be this many intervals apart.
_APART = 3


def autoscaling_of(given: Mapping[str, Any], *, is_counted: bool) -> AutoscalingConfig:
    """Serve's configuration from what an operator gives.

    With `ScalingPolicy` what is not given is such that the policy alone decides: Serve adds no
    delays to its own, and replicas report as often as it counts.

    Args:
        given: Fields of Serve's `AutoscalingConfig`.
        is_counted: Whether requests pass through Serve, so that it can count them.

    Raises:
        ValueError: A field is wrong, or does not go with another.
    """
    if unknown := given.keys() - AutoscalingConfig.model_fields.keys():
        raise ConfigError(
            f"'autoscaling' must be of {', '.join(AutoscalingConfig.model_fields)} (got "
            f"{', '.join(sorted(unknown))}); correct it."
        )
    try:
        policy = AutoscalingPolicy.model_validate(given.get("policy", {}))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"'policy_function' must be the path of a function or class (got {given['policy']}: "
            f"{error}); ours is {SCALING_POLICY!r}."
        ) from error
    if policy.is_default_policy_function() and not is_counted:
        raise ConfigError(
            "'autoscaling' must name a 'policy' where 'front' is not 'serve' (got none): Serve "
            f"counts no request there; give {SCALING_POLICY!r}."
        )
    if policy.policy_function.replace(":", ".") != SCALING_POLICY.replace(":", "."):
        return AutoscalingConfig(**given)
    heartbeat_s = _made(policy.policy_kwargs).options.heartbeat_s
    defaults = {
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": heartbeat_s,
        "look_back_period_s": _REPORTED * heartbeat_s,
    }
    config = AutoscalingConfig(**defaults | dict(given))
    if config.min_replicas < 1:
        raise ConfigError(
            f"'min_replicas' must be >= 1 (got {config.min_replicas}): where no replica is, nobody "
            "counts requests."
        )
    needed_s = heartbeat_s + _APART * config.metrics_interval_s
    if config.look_back_period_s < needed_s:
        raise ConfigError(
            f"'look_back_period_s' must be >= 'heartbeat_s' + {_APART} x 'metrics_interval_s' = "
            f"{needed_s:g} (got {config.look_back_period_s:g}), or no heartbeat is ever known of "
            "all replicas; leave both out."
        )
    return config


def _made(arguments: Mapping[str, Any]) -> ScalingPolicy:
    try:
        return ScalingPolicy(**arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"'policy_kwargs' must be arguments of ScalingPolicy (got {arguments}: {error}); "
            "correct them."
        ) from error
