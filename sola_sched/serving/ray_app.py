"""The application on Ray Serve: engines, and the gateway or Serve's own proxy before them.

`build` is what a Serve configuration names as `import_path`; its `args` are those of `ClusterArgs`.
Ray starts, watches and scales; requests travel by plain HTTP, which costs a hundredth of the time
that an actor message for each token does (`docs/cluster.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import ray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from sola_sched.config.flags import is_loopback
from sola_sched.proxy.keys import keys_of
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.listener import ADMIN_HOST, Listener, listening, warn_of
from sola_sched.serving import membership
from sola_sched.serving.arrivals import ARRIVALS
from sola_sched.serving.gateway import Gateway
from sola_sched.serving.options import GatewayOptions
from sola_sched.serving.policies import DEFAULT, NAMES, make_router
from sola_sched.serving.ray_router import URL
from sola_sched.serving.ray_scaling import autoscaling_of
from sola_sched.serving.slo_headers import ClientRules

logger = logging.getLogger(__name__)

#: Serve must not queue: the queue belongs to the scheduler.
_MAX_ONGOING = 100_000
_HEALTH_PERIOD_S = 2.0
_FOLLOW_S = 1.0
#: Serve kills a replica that has not ended so long after it has drained.
_STOP_S = 20.0
#: The same of a gateway, whose requests have two minutes to end.
_GATEWAY_STOP_S = 140.0
LOOPBACK = "127.0.0.1"
_ALL_ADDRESSES = (None, "0.0.0.0", "::")
ROUTER_CLASS = "sola_sched.serving.ray_router.SolaRequestRouter"


class EngineGroup(BaseModel):
    """Replicas of one kind.

    Attributes:
        num_replicas: How many; not together with `autoscaling`. 1 if there is neither.
        num_gpus: GPUs of each; tensor parallel engines of several take them on one node.
        resources: Other resources of Ray that each needs, e.g. an accelerator type.
        options: Arguments of `vllm serve` beside those of all engines, by name.
        env: Environment variables.
        autoscaling: Serve's `autoscaling_config`; `ray_scaling.autoscaling_of` completes it.
        drain_s: Seconds in which a replica that Serve ends may finish its requests. The gateway
            resumes elsewhere what is left.
    """

    model_config = ConfigDict(extra="forbid")

    num_replicas: int | None = Field(default=None, ge=1)
    num_gpus: float = Field(default=0.0, ge=0.0)
    resources: dict[str, float] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    autoscaling: dict[str, Any] | None = None
    drain_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_one_number(self) -> Self:
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError(
                f"'num_replicas' must be left out where 'autoscaling' is given (got "
                f"{self.num_replicas}); give 'min_replicas' and 'max_replicas' there."
            )
        return self


class ClusterArgs(BaseModel):
    """What the application is made of.

    Attributes:
        model: Name or folder.
        options: Arguments of `vllm serve` for all engines, by name.
        engines: Groups of replicas; unequal ones differ in options or resources.
        router: One of `policies.NAMES`.
        front: `gateway`; `serve` for Serve's own proxy, which retries and resumes nothing; `none`
            for engines that the gateway of another application follows.
        follows: Name of a service: the gateway also serves by the engines of all applications that
            are called so and ``--`` and whatever, as they come and go.
        host: Address that the gateway listens on; None for all addresses of its node. By default
            only its own node can reach it.
        port: Of the gateway.
        engine_host: Address that each engine listens on; None for its node's own, which a cluster
            of several nodes needs. By default None where the gateway listens on all addresses, and
            else `host`.
        gateway_resources: Ray resources that the gateway needs, e.g. to tie it to one node.
        gateway: Fields of `GatewayOptions`.
        limits: Fields of `Limits`: what clients may take.
        rules: Fields of `ClientRules`: what they may say of their requests.
        api_key_file: File with the keys that clients must have, on the gateway's node; beside it,
            the variable SOLA_API_KEY of its process.
        admin_host: Address for `/metrics` and `/replicas`; None for all of the node's.
        admin_port: Of that.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    options: dict[str, Any] = Field(default_factory=dict)
    engines: list[EngineGroup] = Field(default_factory=lambda: [EngineGroup()])
    router: str = Field(default=DEFAULT, pattern=f"^({'|'.join(NAMES)})$")
    front: str = Field(default="gateway", pattern="^(gateway|serve|none)$")
    follows: str | None = None
    host: str | None = LOOPBACK
    port: int = Field(default=8000, ge=0, le=65535)
    engine_host: str | None = None
    gateway_resources: dict[str, float] = Field(default_factory=dict)
    gateway: dict[str, float] = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)
    rules: dict[str, bool] = Field(default_factory=dict)
    api_key_file: str | None = None
    admin_host: str | None = ADMIN_HOST
    admin_port: int = Field(default=0, ge=0, le=65535)

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        if "engine_host" not in self.model_fields_set and self.host not in _ALL_ADDRESSES:
            self.engine_host = self.host
        return self

    @model_validator(mode="after")
    def _has_engines(self) -> Self:
        if not self.engines and (self.follows is None or self.front != "gateway"):
            raise ValueError(
                "'engines' must not be empty (got none) but for a gateway that 'follows' others."
            )
        if len(self.engines) > 1 and self.front != "gateway":
            raise ValueError(
                "'front' must be 'gateway' where there are several groups of engines (got "
                f"{len(self.engines)} and {self.front!r})."
            )
        for group in self.engines:
            if group.autoscaling is not None:
                autoscaling_of(group.autoscaling, is_counted=self.front == "serve")
        return self


class Engine:
    """One vLLM server in a replica, on a port of its own.

    Args:
        options: Arguments of `vllm serve`, by name.
        host: Address to listen on; None is the node's own.
        drain_s: As in `EngineGroup`.
    """

    def __init__(self, options: dict[str, Any], host: str | None, drain_s: float = 0.0) -> None:
        self._options, self._drain_s = options, drain_s
        self._host = _engine_address(host, options)
        self._server: Any = None
        self._lock = asyncio.Lock()

    async def _started(self) -> Any:
        async with self._lock:
            if self._server is None:
                self._server = await self._start(self._host)
        return self._server

    async def _start(self, host: str) -> Any:
        """A server that listens."""
        from sola_sched.serving.engine import EngineServer, to_arguments

        server = await EngineServer.start(to_arguments(self._options))
        await server.serve(host)
        return server

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Asked once, before the replica counts as ready: where it is."""
        return {URL: (await self._started()).url}

    async def check_health(self) -> None:
        """Asked every few seconds; a replica whose engine is dead is replaced."""
        if self._server is not None:
            await self._server.check()

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """Asked every `metrics_interval_s` where replicas scale: `Arrivals.stats`."""
        return ARRIVALS.stats()

    async def __del__(self) -> None:
        """Let the requests end, then the engine's processes."""
        if self._server is not None:
            await ARRIVALS.drain(self._drain_s)
            await self._server.stop()


@serve.ingress()
class IngressEngine(Engine):
    """One whose requests come through Serve's own proxy as well."""

    async def __serve_build_asgi_app__(self) -> Any:
        """vLLM's application."""
        return (await self._started()).app


class GatewayServer:
    """The gateway in a replica, on the public port.

    Args:
        engines: Handles of the engines' deployments.
        args: Of the application.
    """

    def __init__(self, engines: list[DeploymentHandle], args: Mapping[str, Any]) -> None:
        self._args = ClusterArgs(**args)
        file = self._args.api_key_file
        self._keys = keys_of(None, None if file is None else Path(file))
        self._gateway = Gateway(
            make_router(self._args.router),
            GatewayOptions(**self._args.gateway),  # type: ignore[arg-type]
            limits=Limits.of(self._args.limits),
            keys=self._keys,
            rules=ClientRules(**self._args.rules),
        )
        self._engines = engines
        self._urls: dict[str, Mapping[str, str]] = {}
        self._listening = contextlib.AsyncExitStack()
        self._listener: Callable[[str, Mapping[str, str]], None] | None = None
        self._url = self._admin_url = ""
        self._asking: list[asyncio.Task[None]] = []

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Asked once, before the replica counts as ready: starts the server."""
        self._listener = functools.partial(_tell, asyncio.get_running_loop(), self._sync)
        membership.listeners.append(self._listener)
        host = self._args.host or "0.0.0.0"
        warn_of("gateway", host, self._keys)
        admin = (self._args.admin_host or "0.0.0.0", self._args.admin_port)
        self._url, self._admin_url = await self._listening.enter_async_context(
            listening(
                (Listener(self._gateway.app(), self._gateway.front), (host, self._args.port)),
                (Listener(self._gateway.admin_app()), admin),
            )
        )
        self._asking = [asyncio.create_task(_wake_router(engine)) for engine in self._engines]
        if self._args.follows is not None:
            self._asking.append(asyncio.create_task(self._follow(self._args.follows)))
        logger.info("the gateway listens on %s, for operators %s", self._url, self._admin_url)
        return {URL: self._url}

    async def _follow(self, service: str) -> None:
        """Take in the engines of the service's other applications, as they come and go."""
        known: set[str] = set()
        while True:
            try:
                there = set(await asyncio.to_thread(_engines_of, service))
                for name in there - known:
                    try:
                        handle = serve.get_deployment_handle(_engine_name(0), name)
                    except KeyError:  # it is still being built, or cannot be
                        continue
                    self._asking.append(asyncio.create_task(_wake_router(handle)))
                    known.add(name)
                for name in known - there:
                    self._sync(membership.key(name, _engine_name(0)), {})
                known &= there
                self._asking = [task for task in self._asking if not task.done()]
            except Exception:  # Serve's controller starts anew: those that are known go on
                logger.exception("which engines %s has cannot be told; asking again", service)
            await asyncio.sleep(_FOLLOW_S)

    def _sync(self, name: str, urls: Mapping[str, str]) -> None:
        self._urls[name] = urls
        if not urls:  # it may never come back
            del self._urls[name]
        self._gateway.sync({k: v for each in self._urls.values() for k, v in each.items()})

    async def url(self) -> str:
        """Where it listens."""
        return self._url

    async def admin_url(self) -> str:
        """Where its `/metrics` and `/replicas` are."""
        return self._admin_url

    async def counts(self) -> dict[str, int]:
        """What the gateway has counted."""
        return dict(self._gateway.counts)

    async def __del__(self) -> None:
        """Stop listening."""
        if self._listener in membership.listeners:
            membership.listeners.remove(self._listener)
        for task in self._asking:
            task.cancel()
        await self._listening.aclose()


def _engine_address(host: str | None, options: Mapping[str, Any]) -> str:
    """The address that an engine listens on, by which others can name it too."""
    if host is None or host in _ALL_ADDRESSES:
        host = str(ray.util.get_node_ip_address())
    has_key = options.get("api_key") or options.get("api-key") or os.environ.get("VLLM_API_KEY")
    if not has_key and not is_loopback(host):
        logger.warning(
            "the engine listens on %s, and nothing protects it: whoever reaches that address can "
            "use it. Give 'options' an 'api_key', or let a firewall keep others away.", host,
        )  # fmt: skip
    return host


def _tell(loop: asyncio.AbstractEventLoop, action: Any, name: str, urls: Mapping[str, str]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the replica ends
        loop.call_soon_threadsafe(action, name, urls)


def _engines_of(service: str) -> list[str]:
    """Names of the applications that hold engines of a service."""
    return [name for name in serve.status().applications if name.startswith(f"{service}--")]


def _engine_name(place: int) -> str:
    return f"engine-{place}"


async def _wake_router(engine: DeploymentHandle) -> None:
    """Have Serve make the deployment's router in this process; it hears of the replicas then."""
    with contextlib.suppress(Exception):  # what it chooses is of no interest
        async with engine.choose_replica(_reserve=False):
            pass


def build(args: dict[str, Any]) -> serve.Application:
    """The application.

    Args:
        args: Of `ClusterArgs`.
    """
    cluster = ClusterArgs(**args)
    is_behind_proxy, is_bare = cluster.front == "serve", cluster.front == "none"
    engines = [
        _engine(cluster, group, i, is_behind_proxy) for i, group in enumerate(cluster.engines)
    ]
    if is_behind_proxy or is_bare:
        return engines[0]
    gateway = serve.deployment(GatewayServer).options(
        name="gateway",
        num_replicas=1,
        graceful_shutdown_timeout_s=_GATEWAY_STOP_S,
        ray_actor_options={"num_cpus": 0, "resources": cluster.gateway_resources},
    )
    return gateway.bind(engines, cluster.model_dump())


def _engine(
    cluster: ClusterArgs, group: EngineGroup, place: int, is_behind_proxy: bool
) -> serve.Application:
    options = {"model": cluster.model, **cluster.options, **group.options}
    if is_behind_proxy:
        options.setdefault("middleware", "sola_sched.serving.slo_middleware.SloHeaders")
    scale: dict[str, Any] = {"num_replicas": group.num_replicas or 1}
    if group.autoscaling is not None:
        scale = {
            "autoscaling_config": autoscaling_of(group.autoscaling, is_counted=is_behind_proxy)
        }
    deployment = serve.deployment(IngressEngine if is_behind_proxy else Engine).options(
        name=_engine_name(place),
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=group.drain_s + _STOP_S,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_CLASS,
            request_router_kwargs={"router": cluster.router},
        ),
        ray_actor_options={
            "num_cpus": 0,
            "num_gpus": group.num_gpus,
            "resources": group.resources,
            "runtime_env": {"env_vars": group.env},
        },
        **scale,
    )
    return deployment.bind(options, cluster.engine_host, group.drain_s)
