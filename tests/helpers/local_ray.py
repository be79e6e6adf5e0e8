"""Ray on this machine alone, for one test module."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # a busy machine starves what is nice
}
_HELPERS = str(Path(__file__).resolve().parent)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Ray with two CPUs, whose processes can import these helpers; ends Serve and Ray with it.

    Args:
        options: More for `ray.init`.
    """
    os.environ.update(_ENVIRONMENT, PYTHONPATH=_HELPERS)
    import ray
    from ray import serve

    ray.init(
        num_cpus=2,
        object_store_memory=80 * 2**20,
        logging_level="warning",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        **{"include_dashboard": False} | options,
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def local_ray_with_dashboard() -> Iterator[str]:
    """`local_ray` as one node that services can be placed on; the URL of Serve's REST API."""
    port = free_port()
    with local_ray(
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        resources={"sola_node_0": 1},
    ):
        yield f"http://127.0.0.1:{port}"
