"""Services on a fake Ray Serve and the loop that places them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fake_serve import FakeServe

from sola_sched.adaptive_placement.follow import Follower
from sola_sched.adaptive_placement.observe import Observed, Observer
from sola_sched.adaptive_placement.search import Options
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.cluster.sharing.placement import Cluster

CHAT = {"name": "chat", "model": "llama-3-8b", "rate": 1, "ttft": 1500, "tpot": 80,
        "prompt": 200, "output": 60}  # fmt: skip


CODE = CHAT | {"name": "code", "model": "llama-2-7b", "rate": 0.3}


TALK = CHAT | {"name": "talk", "model": "opt-6.7b", "rate": 0.3}


class FakeObserver(Observer):
    """Says what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Observed] = {}
        self.asked: list[dict[str, str]] = []

    def since_last(self, gateways: Any) -> dict[str, Observed]:
        self.asked.append(dict(gateways))
        return self.seen


@dataclass
class World:
    """A fake Serve, a clock, descriptions, and the loop."""

    serve: FakeServe
    address: str
    text: str = "[]"
    now_s: float = 0.0
    num_gpus: int = 4
    observer: FakeObserver = field(default_factory=FakeObserver)

    def __post_init__(self) -> None:
        self.follower = self.make()

    def make(self) -> Follower:
        api = ServeApi(self.address, clock=lambda: self.now_s, sleep=self.sleep)
        return Follower(
            api, lambda: self.text, Options("a100", Cluster.of(self.num_gpus)), interval_s=100.0,
            observer=self.observer, limit_s=60.0, clock=lambda: self.now_s, sleep=self.sleep,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def describe(self, *services: dict[str, Any]) -> None:
        self.text = json.dumps(services)
        self.follower.tick()

    def served(self) -> set[str]:
        """Services that have an engine and a gateway."""
        with_engine = {name.partition("--")[0] for name in self.serve.engines}
        return with_engine & set(self.serve.names)
