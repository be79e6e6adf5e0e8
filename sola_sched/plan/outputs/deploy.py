"""Services on their GPUs as applications of Ray Serve, and back.

Each engine is an application of its own, and so is each service's gateway, which follows its
engines as they come and go. Serve starts everything in an application anew when its arguments
change, so an engine that stays where it is has to be in one whose arguments stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.seats import Seat, seat
from sola_sched.cluster.sharing.services import Service
from sola_sched.errors import ConfigError
from sola_sched.simulator.sharing.cluster import Setting
from sola_sched.simulator.sharing.hardware import model_of

Application = dict[str, Any]

FIRST_PORT = 8000
#: Where gateways listen unless told otherwise, and engines that nobody on another node asks.
LOOPBACK = "127.0.0.1"
_IMPORT_PATH = "sola_sched.serving.ray_app:build"
#: A request waits so long for an engine while its service is moved.
_PATIENCE_S = 900.0
_NODE_NAME = "sola_node_"
_NODE = re.compile(rf"{_NODE_NAME}(\d+)")
#: Of a node's resource, so little that it is never used up.
_SOME = 0.001
#: From a service's public port to that for operators, and the last that there is.
_ADMIN_STEP, _LAST_PORT = 1000, 65535


def serve_config(applications: Iterable[Application]) -> dict[str, Any]:
    """What `serve deploy` reads.

    Nodes need the resource ``sola_node_I`` for I = 0, 1, ..., e.g. ``ray start ... --resources
    '{"sola_node_0": 1}'``.
    """
    return {"proxy_location": "Disabled", "applications": list(applications)}


def serve_config_of(placement: Placement, setting: Setting) -> dict[str, Any]:
    """The placement for `serve deploy`, with models by their names on the hub."""
    names_of(setting.services)
    given = ports(sorted(setting.services), {})
    gateways = [gateway_application(name, port) for name, port in given.items()]
    return serve_config(
        [*gateways, *engine_applications(seat(placement, setting.cluster), setting)]
    )


def engine_applications(seats: Sequence[Seat], setting: Setting) -> list[dict[str, Any]]:
    """The engines of all groups, in order of the services' names."""
    placement = Placement(tuple(one.group for one in seats))
    host = LOOPBACK if setting.cluster.num_nodes == 1 else None
    found = []
    for one in seats:
        shares = setting.memory_shares(placement, one.group)
        for name in one.group.services:
            found.append(engine_application(setting.services[name], one, shares[name], host))
    return sorted(found, key=lambda application: str(application["name"]))


def names_of(services: Iterable[str]) -> dict[str, str]:
    """Names of the services' applications, which Serve allows few characters in.

    Raises:
        ConfigError: Two services would have the same.
    """
    names: dict[str, str] = {}
    for service in services:
        name = re.sub(r"[^A-Za-z0-9_]+", "-", service)
        if name in names.values():
            other = next(key for key, value in names.items() if value == name)
            raise ConfigError(
                f"names of services must differ in letters or digits (got {service!r} and "
                f"{other!r}); rename one."
            )
        names[service] = name
    return names


def gateway_application(service: str, port: int, host: str = LOOPBACK) -> Application:
    """The service's public port, on the first node."""
    name = names_of([service])[service]
    return {
        "name": name,
        "route_prefix": None,
        "import_path": _IMPORT_PATH,
        "args": {
            "model": service,
            "port": port,
            "host": host,
            "admin_host": host,
            "admin_port": admin_port_of(port),
            "gateway_resources": {f"{_NODE_NAME}0": _SOME},
            "engines": [],
            "follows": name,
            "gateway": {"patience_s": _PATIENCE_S},
        },
    }


def admin_port_of(port: int) -> int:
    """The port for the operators of a service with this public port."""
    return port + (_ADMIN_STEP if port + _ADMIN_STEP <= _LAST_PORT else -_ADMIN_STEP)


def place_of(seat: Seat) -> str:
    """The seat in the names of its applications, and its group of turns."""
    return f"node{seat.node}-gpu{'-'.join(str(gpu) for _, gpu in seat.gpus)}"


def service_of(application: Application) -> str:
    """Whose engine it is."""
    return str(application["args"]["options"]["served_model_name"])


def engine_options(service: Service) -> dict[str, Any]:
    """What the service says of its engines, wherever they are: arguments of `vllm serve`."""
    additional = dict(service.engine.get("additional_config", {}))
    additional["sola_sched"] = {**additional.get("sola_sched", {}), **targets(service)}
    return {
        "model": model_of(service.model).name,
        # The model's, or what the engine's share of the memory holds.
        "max_model_len": "auto",
        # What is simulated, see `Setting.limits`.
        "max_num_seqs": Setting.max_num_seqs,
        "max_num_batched_tokens": Setting.max_num_batched_tokens,
        **service.engine,
        "additional_config": additional,
    }


def engine_application(
    service: Service, seat: Seat, memory: float, host: str | None = None
) -> Application:
    """The service's engine in one group; it takes turns with others of the group.

    Args:
        service: Whose.
        seat: The group and its GPUs.
        memory: Share of each GPU's memory.
        host: Address that the engine listens on; None for its node's own.
    """
    devices = ",".join(str(gpu) for _, gpu in seat.gpus)
    place = place_of(seat)
    options = engine_options(service)
    if len(seat.group.services) > 1:
        options["additional_config"]["sola_sched"]["turns"] = {"group": place}
    return {
        "name": f"{names_of([service.name])[service.name]}--{place}",
        "route_prefix": None,
        "import_path": _IMPORT_PATH,
        "args": {
            "model": options.pop("model"),
            "host": host,
            "front": "none",
            "options": {"served_model_name": service.name},
            "engines": [
                {
                    "num_replicas": 1,
                    "num_gpus": 0,
                    "resources": {f"{_NODE_NAME}{seat.node}": _SOME},
                    "env": {"CUDA_VISIBLE_DEVICES": devices},
                    "options": {
                        **options,
                        "tensor_parallel_size": seat.group.degree,
                        # Rounded down: the shares of a GPU must not exceed it.
                        "gpu_memory_utilization": math.floor(1000 * memory) / 1000,
                    },
                }
            ],
        },
    }


def ports(
    services: Sequence[str], taken: Mapping[str, int], first: int = FIRST_PORT
) -> dict[str, int]:
    """A port for each service's gateway from `first` on; those that are `taken` stay."""
    found = {name: taken[name] for name in services if name in taken}
    for name in services:
        if name not in found:
            used = {*taken.values(), *found.values()}
            found[name] = next(p for p in range(first, 2**16) if p not in used)
    return found


def targets(service: Service) -> dict[str, float | None]:
    """The service's targets as the scheduler's options; None for none."""
    found = {"ttft_s": service.slo.ttft_s, "tpot_s": service.slo.tpot_s}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def description(application: Application) -> dict[str, Any]:
    """The `engine_options` of an engine that is deployed."""
    args = application["args"]
    options = {"model": args["model"], **args["engines"][0]["options"]}
    del options["tensor_parallel_size"], options["gpu_memory_utilization"]
    additional = dict(options["additional_config"])
    sola = dict(additional["sola_sched"])
    sola.pop("turns", None)
    return options | {"additional_config": additional | {"sola_sched": sola}}


def engines_of(applications: Iterable[Application]) -> dict[tuple[str, Seat], Application]:
    """The engines among deployed applications, by service and seat; others are left out."""
    found: dict[tuple[int, str], list[tuple[str, Application]]] = {}
    for application in applications:
        args = application.get("args") or {}
        if application.get("import_path") != _IMPORT_PATH or args.get("front") != "none":
            continue
        engine = args["engines"][0]
        match = next(filter(None, map(_NODE.fullmatch, engine["resources"])), None)
        if match is None:
            continue
        place = (int(match[1]), str(engine["env"]["CUDA_VISIBLE_DEVICES"]))
        found.setdefault(place, []).append((service_of(application), application))
    engines: dict[tuple[str, Seat], Application] = {}
    for (node, devices), held in found.items():
        gpus = tuple((node, int(gpu)) for gpu in devices.split(","))
        names = tuple(sorted(service for service, _ in held))
        one = Seat(Group(len(gpus), names), gpus)
        engines |= {(service, one): application for service, application in held}
    return engines


def gateways_of(applications: Iterable[Application]) -> dict[str, Application]:
    """The gateways among deployed applications, by service."""
    return {
        str(application["args"]["model"]): application
        for application in applications
        if application.get("import_path") == _IMPORT_PATH
        and (application.get("args") or {}).get("follows") is not None
    }
