"""Where operators ask what `plan` and `adaptive_placement` have deployed."""

from __future__ import annotations

from urllib.parse import urlsplit

from sola_sched.config.flags import url_of
from sola_sched.plan.outputs.deploy import admin_port_of


def admin_of(url: str) -> str:
    """The operators' URL of a service's gateway."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return url_of(parts.hostname, admin_port_of(parts.port))
