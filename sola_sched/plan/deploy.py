"""A placement as a configuration of Ray Serve: `serve deploy FILE`, again for each new one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sola_sched.cluster.sharing.placement import Cluster, Placement, gpus_of
from sola_sched.cluster.sharing.services import Service

_FIRST_PORT = 8000


def serve_config(
    placement: Placement,
    services: Mapping[str, Service],
    cluster: Cluster,
    memory: Mapping[tuple[int, str], float],
) -> dict[str, Any]:
    """An application for each service, an engine of it for each of its groups.

    Engines of a group are pinned to its GPUs and take turns on them. Nodes need the resource
    ``sola_node_I`` for I = 0, 1, ..., e.g. ``ray start ... --resources '{"sola_node_0": 1}'``.
    Serve starts a changed deployment and drains the old one, so that a service whose groups stay
    is not touched, and requests in flight end or are resumed by the gateway.

    Args:
        placement: Where each service goes.
        services: By name.
        cluster: Its GPUs.
        memory: Share of each GPU's memory of (group, service), beside others of the group.
    """
    gpus = gpus_of(placement, cluster)
    applications = []
    for number, (name, service) in enumerate(sorted(services.items())):
        engines = []
        for position in placement.groups_of(name):
            group, places = placement.groups[position], gpus[position]
            node = places[0][0]
            devices = ",".join(str(gpu) for _, gpu in places)
            sola = {"turns": {"group": f"group{position}"}} if len(group.services) > 1 else {}
            engines.append(
                {
                    "num_replicas": 1,
                    "num_gpus": 0,
                    "resources": {f"sola_node_{node}": 0.001},
                    "env": {"CUDA_VISIBLE_DEVICES": devices},
                    "options": {
                        "tensor_parallel_size": group.degree,
                        "gpu_memory_utilization": round(memory[(position, name)], 3),
                        "additional_config": {"sola_sched": targets(service) | sola},
                    },
                }
            )
        applications.append(
            {
                "name": re.sub(r"[^A-Za-z0-9_-]", "-", name),
                "route_prefix": None,
                "import_path": "sola_sched.serving.ray_app:build",
                "args": {
                    "model": service.model,
                    "port": _FIRST_PORT + number,
                    "host": None,
                    "options": {"served_model_name": name},
                    "engines": engines,
                },
            }
        )
    return {"proxy_location": "Disabled", "applications": applications}


def targets(service: Service) -> dict[str, Any]:
    """The service's targets as the scheduler's options."""
    found = {"ttft_s": service.slo.ttft_s, "tpot_s": service.slo.tpot_s}
    return {key: value for key, value in found.items() if value != float("inf")}
