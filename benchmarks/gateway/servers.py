"""The servers of the gateway's measurements: engines on Ray Serve, gateways, one plain vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.clients import QUIET, Traffic, get_json, wait_for

_HERE = Path(__file__).resolve().parent
#: Seconds that a step of the two replicas takes more than this machine needs.
STEPS_S = (0.02, 0.05)
MAX_NUM_SEQS = 4
#: In Ray's gateway, in gateways of their own, and in Serve's own proxy by our router.
ROUTER = "least-ttft"
_STALL_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """What runs on Ray Serve.

    Attributes:
        proxy_url: Of Serve's own proxy.
        gateway_url, admin_url: Of the gateway, a deployment too.
        proxies, fronts: Processes of the proxy, and of the replicas with vLLM's server.
    """

    proxy_url: str
    gateway_url: str
    admin_url: str
    proxies: tuple[int, ...]
    fronts: tuple[int, ...]

    @property
    def urls(self) -> list[str]:
        """The replicas' own."""
        return [replica["url"] for replica in self.replicas()]

    def replicas(self) -> list[dict[str, Any]]:
        """What the gateway knows."""
        shown: list[dict[str, Any]] = get_json(f"{self.admin_url}/replicas")
        return shown

    def kill(self, name: str) -> None:
        """Kill the process of the replica of this name."""
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if name in actor["name"]:
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
                return
        raise RuntimeError(f"there is no actor of the replica {name}")


def engine_options(traffic: Traffic) -> dict[str, Any]:
    """Arguments of every engine."""
    return {
        "served_model_name": "tiny",
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.15,
        "additional_config": {
            "sola_sched": {
                "ttft_s": traffic.ttft_s, "tpot_s": traffic.tpot_s, "load_interval_s": 0.1,
            }
        },
    }  # fmt: skip


@contextmanager
def cluster(model_dir: Path, traffic: Traffic) -> Iterator[Cluster]:
    """Two unequal engines in one deployment, behind Serve's proxy and behind the gateway."""
    os.environ["PYTHONPATH"] = str(_HERE)  # Ray's processes import from here, and this one
    sys.path.append(str(_HERE))
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from sola_sched.serving.ray_app import GatewayServer, IngressEngine

    proxy_port, gateway_port, admin_port = free_port(), free_port(), free_port()
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
        logging_level="warning", log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    taken = tempfile.mkdtemp(prefix="bench-gateway-steps-")
    steps = {"SLOW_STEPS": " ".join(map(str, STEPS_S)), "SLOW_STEPS_TAKEN": taken}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": proxy_port})
        engines = serve.deployment(IngressEngine).options(
            name="engine",
            num_replicas=2,
            max_ongoing_requests=100_000,
            request_router_config=RequestRouterConfig(
                request_router_class="either_router.EitherRouter",
                request_router_kwargs={"router": ROUTER},
            ),
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": QUIET | steps}},
        )
        options = engine_options(traffic) | {
            "model": str(model_dir),
            "scheduler_cls": "slow_scheduler.SlowScheduler",
        }
        handle = serve.run(engines.bind(options, "127.0.0.1"), name="engines")
        args = {
            "model": "tiny", "host": "127.0.0.1", "port": gateway_port, "router": ROUTER,
            "admin_port": admin_port, "gateway": {"stall_s": _STALL_S},
        }  # fmt: skip
        gateway = serve.deployment(GatewayServer).options(ray_actor_options={"num_cpus": 0})
        serve.run(gateway.bind([handle], args), name="gateway", route_prefix=None)
        url, admin = (f"http://127.0.0.1:{port}" for port in (gateway_port, admin_port))
        wait_for(lambda: sum(r["is_usable"] for r in get_json(f"{admin}/replicas")) == len(STEPS_S))
        proxies, fronts = _processes("ray::ProxyActor"), _processes("ray::ServeReplica:engines")
        yield Cluster(f"http://127.0.0.1:{proxy_port}", url, admin, proxies, fronts)
    finally:
        serve.shutdown()
        ray.shutdown()


def _processes(title: str) -> tuple[int, ...]:
    """Of those that this one has started, the ones of this title."""
    import psutil  # type: ignore[import-untyped]

    children = psutil.Process().children(recursive=True)
    found = [child.pid for child in children if "".join(child.cmdline()[:1]).startswith(title)]
    assert found, f"no process of ours is called {title}"
    return tuple(found)


@contextmanager
def gateway(router: str, urls: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A gateway of its own before the engines; yields its URL and process."""
    port, admin_port = free_port(), free_port()
    command = [
        *(sys.executable, "-P", "-m", "sola_sched.serving", "gateway"),
        *("--router", router, "--port", str(port), "--admin-port", str(admin_port)),
        *("--stall-s", str(_STALL_S)),
        *(part for url in urls for part in ("--replica", url)),
    ]
    url, admin = (f"http://127.0.0.1:{each}" for each in (port, admin_port))
    with _process(command) as pid:
        wait_for(lambda: all(r["has_feed"] is not None for r in get_json(f"{admin}/replicas")))
        yield url, pid


@contextmanager
def plain_server(model_dir: Path, traffic: Traffic) -> Iterator[tuple[str, int]]:
    """`vllm serve` as it is; yields its URL and the process of its HTTP server."""
    from sola_sched.serving.engine import to_arguments

    port = free_port()
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *to_arguments(engine_options(traffic) | {"additional_config": {}}),
    ]
    url = f"http://127.0.0.1:{port}"
    with _process(command) as pid:
        wait_for(lambda: get_json(f"{url}/v1/models"))
        yield url, pid


@contextmanager
def _process(command: Sequence[str]) -> Iterator[int]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **QUIET})
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
