"""A gateway on Ray Serve follows the applications of its service as they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

pytest.importorskip("ray.serve")

from gateway_clients import until

from sola_sched.serving import membership, ray_app

pytestmark = pytest.mark.ray


def test_an_application_that_is_still_being_built_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, built = {"svc--1", "svc--2"}, {"svc--2"}
    woken: list[str] = []
    told: list[tuple[str, Mapping[str, str]]] = []

    def handle(_: str, name: str) -> str:
        if name not in built:
            raise KeyError(name)
        return name

    async def wake(name: str) -> None:
        woken.append(name)

    monkeypatch.setattr(ray_app, "_FOLLOW_S", 0.005)
    monkeypatch.setattr(ray_app, "_engines_of", lambda _: sorted(there))
    monkeypatch.setattr(ray_app, "_wake_router", wake)
    monkeypatch.setattr(ray_app.serve, "get_deployment_handle", handle)
    gateway = ray_app.GatewayServer([], {"model": "m", "engines": [], "follows": "svc"})
    monkeypatch.setattr(gateway, "_sync", lambda *args: told.append(args))

    async def whole() -> None:
        following = asyncio.create_task(gateway._follow("svc"))
        await until(lambda: woken)
        await asyncio.sleep(0.05)
        assert (woken, len(gateway._asking)) == (["svc--2"], 0)
        built.add("svc--1")
        await until(lambda: len(woken) == 2)
        there.remove("svc--2")
        await until(lambda: told)
        await asyncio.sleep(0.05)
        following.cancel()

    asyncio.run(whole())
    assert woken == ["svc--2", "svc--1"]
    assert told == [(membership.key("svc--2", "engine-0"), {})]
