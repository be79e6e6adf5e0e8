"""Applications of `sola_sched.serving.ray_app` with fake engines: a Serve import path for tests."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from sola_sched.serving.ray_app import ROUTER_CLASS
from sola_sched.serving.ray_app import build as build_real

BAD_MODEL = "facebook/opt-6.7b"
TOKEN_S = 0.02


def build(args: dict[str, Any]) -> serve.Application:
    """The application; an engine of `BAD_MODEL` cannot be made."""
    if args.get("front") != "none":
        return build_real(args)
    if args["model"] == BAD_MODEL:
        raise ValueError("no such model")
    from fake_engine import FakeEngine

    (group,) = args["engines"]
    engine = serve.deployment(FakeEngine).options(
        name="engine-0",
        ray_actor_options={"num_cpus": 0, "resources": group["resources"]},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER_CLASS),
    )
    return engine.bind(TOKEN_S)
