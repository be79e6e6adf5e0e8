"""The applications that there are to be: ours as they were decided, others' as they are."""

from __future__ import annotations

from collections.abc import Sequence

from sola_sched.cluster.sharing.seats import Seat
from sola_sched.plan.outputs.deploy import (
    Application,
    description,
    engine_options,
    engines_of,
    gateways_of,
)
from sola_sched.simulator.sharing.cluster import Setting


class State:
    """Applications that are deployed, by name; others' are kept as they are now."""

    def __init__(self, deployed: Sequence[Application]) -> None:
        self._by_name = {str(one["name"]): one for one in deployed}
        self.services_before = self.services

    def take_others(self, deployed: Sequence[Application]) -> None:
        """Take in what is deployed now of others; ours are as they are here."""
        others = {str(one["name"]): one for one in deployed if not _is_ours(one)}
        ours = {name: one for name, one in self._by_name.items() if _is_ours(one)}
        self._by_name = others | ours

    @property
    def applications(self) -> list[Application]:
        return list(self._by_name.values())

    @property
    def gateways(self) -> dict[str, Application]:
        return gateways_of(self.applications)

    @property
    def engines(self) -> dict[tuple[str, Seat], Application]:
        return engines_of(self.applications)

    @property
    def seats(self) -> list[Seat]:
        return sorted({place for _, place in self.engines}, key=lambda one: one.gpus)

    @property
    def services(self) -> set[str]:
        return {service for service, _ in self.engines}

    def changed(self, setting: Setting) -> set[str]:
        """Services whose engines are of another description."""
        wanted = {name: engine_options(service) for name, service in setting.services.items()}
        return {
            service
            for (service, _), one in self.engines.items()
            if service in wanted and description(one) != wanted[service]
        }

    def at(self, place: Seat) -> list[Application]:
        return [one for (_, there), one in self.engines.items() if there == place]

    def add(self, application: Application) -> None:
        self._by_name[str(application["name"])] = application

    def remove(self, application: Application) -> None:
        self._by_name.pop(str(application["name"]), None)


def _is_ours(application: Application) -> bool:
    """Whether it is an engine or a gateway as `plan` writes them."""
    try:
        return bool(engines_of([application]) or gateways_of([application]))
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
