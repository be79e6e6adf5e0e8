"""Serve's own router and ours before the same replicas: each request says which it wants."""

from __future__ import annotations

import pickle

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from sola_sched.serving.ray_router import SolaRequestRouter

HEADER = b"x-bench-router"


class EitherRouter(SolaRequestRouter, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray Serve's power of two choices where the header says `ray`, else `SolaRequestRouter`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter.choose_replicas`."""
        is_ray = pending_request is not None and _wanted(pending_request) == b"ray"
        router = PowerOfTwoChoicesRequestRouter if is_ray else SolaRequestRouter
        return await router.choose_replicas(self, candidate_replicas, pending_request)


def _wanted(pending_request: PendingRequest) -> bytes:
    first = pending_request.args[0] if pending_request.args else None
    if isinstance(first, bytes):
        first = pickle.loads(first)  # made by Serve's own proxy, in this process
    headers = dict(getattr(first, "asgi_scope", {}).get("headers", ()))
    return bytes(headers.get(HEADER, b""))
