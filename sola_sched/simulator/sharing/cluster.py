"""A cluster of sharing groups in virtual time: the dispatcher, replacement, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement, check
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.turns import TurnRule
from sola_sched.cluster.sharing.unserved import ServiceOutcome
from sola_sched.simulator.sharing.engine import Served, SharedEngine
from sola_sched.simulator.sharing.group_engine import GroupEngine
from sola_sched.simulator.sharing.hardware import Hardware
from sola_sched.simulator.sharing.profiling import Profile, profile

#: A request that is to come: seconds, service, prompt and output tokens; both are 0 of one that no
#: engine takes.
Arrival = tuple[float, str, int, int]


@dataclass(frozen=True)
class Setting:
    """What all groups have in common.

    Attributes:
        services: By name.
        hardware: The GPUs.
        cluster: How many.
        rule: Makes a group's turn rule.
        max_num_seqs, max_num_batched_tokens: Of each service's engine, unless the service says
            otherwise; see `limits`.
        profiles: Of the services; made from their lengths.
    """

    services: Mapping[str, Service]
    hardware: Hardware
    cluster: Cluster
    rule: Callable[[], TurnRule]
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        services: Sequence[Service],
        hardware: Hardware,
        cluster: Cluster,
        rule: Callable[[], TurnRule],
        chunk: int = 2048,
    ) -> Setting:
        """With profiles.

        Raises:
            ConfigError: Two services have one name, or there is none.
            InfeasibleError: A service fits on no node.
        """
        named = by_name(services)
        known = profile(named, hardware, cluster, chunk)
        return cls(named, hardware, cluster, rule, max_num_batched_tokens=chunk, profiles=known)

    def engine(self, group: Group, now_s: float = 0.0) -> SharedEngine:
        """The fast model of a group."""
        models = [self.services[name].model for name in group.services]
        return SharedEngine(
            {name: self._served(name, group.degree) for name in group.services},
            self.rule(),
            kv_bytes=self.hardware.room_bytes(group.degree, models),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            now_s=now_s,
        )

    def limits(self, name: str) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens` of a service's engines."""
        own = self.services[name].engine
        return (
            int(own.get("max_num_seqs", self.max_num_seqs)),
            int(own.get("max_num_batched_tokens", self.max_num_batched_tokens)),
        )

    def rates(self, placement: Placement, group: Group) -> dict[str, float]:
        """Requests per second of each service of a group, those of a service spread evenly."""
        return {
            name: self.services[name].rate / len(placement.groups_of(name))
            for name in group.services
        }

    def memory_shares(self, placement: Placement, group: Group) -> dict[str, float]:
        """Share of the GPUs' memory for the engine of each service of a group."""
        services = [self.services[name] for name in group.services]
        return self.hardware.memory_shares(group.degree, services, self.rates(placement, group))

    def load_s(self, group: Group, bytes_per_s: float) -> float:
        """Seconds to load the weights of all services of a group, each GPU over its own link."""
        return sum(
            self.hardware.load_s(self.services[name].model, group.degree, bytes_per_s)
            for name in group.services
        )

    def _served(self, name: str, degree: int) -> Served:
        service = self.services[name]
        steps = self.hardware.steps(service.model, degree)
        mean_prompt = float(np.mean([prompt for prompt, _ in service.lengths]))
        habits = self.profiles[name].habits(steps, mean_prompt)
        kv_bytes = self.hardware.kv_bytes(service.model, degree)
        return Served(steps, kv_bytes, habits, *self.limits(name))

    def requests(self, arrivals: Sequence[Arrival]) -> list[SharedRequest]:
        """The requests with their targets, in order of arrival."""
        made = []
        for number, (arrival_s, name, prompt, output) in enumerate(sorted(arrivals)):
            service = self.services[name]
            made.append(
                SharedRequest(
                    number,
                    name,
                    arrival_s,
                    prompt,
                    output,
                    deadline_s=arrival_s + service.slo_scale * self.profiles[name].mean_s,
                    ttft_s=service.slo.ttft_s,
                    tpot_s=service.slo.tpot_s,
                )
            )
        return made

    def outcomes(self, requests: Sequence[SharedRequest]) -> dict[str, ServiceOutcome]:
        """What came of ended requests, by service; one without an end has missed."""
        found = {}
        for name in self.services:
            own = [request for request in requests if request.service == name]
            done = [request for request in own if request.last_s == request.last_s]
            latency = sum(request.latency_s for request in done) / self.profiles[name].mean_s
            met = sum(request.is_met for request in done)
            found[name] = ServiceOutcome(len(own), len(own) - met, latency)
        return found


class SharedCluster:
    """Serves requests by a placement; each goes to the group of its service with the fewest.

    Args:
        setting: What the groups have in common.
        placement: Where the services are.
        now_s: Seconds on the clock.
        make: Makes a group's engine; the fast model if left out.

    Raises:
        InfeasibleError: The placement does not fit, or a service has no place.
    """

    def __init__(
        self,
        setting: Setting,
        placement: Placement,
        now_s: float = 0.0,
        make: Callable[[Group], GroupEngine] | None = None,
    ) -> None:
        check(placement, setting.services, setting.cluster, setting.hardware.fits)
        self.setting, self.placement = setting, placement
        make = make or (lambda group: setting.engine(group, now_s))
        self.engines: list[GroupEngine] = [make(group) for group in placement.groups]
        self._ready_s = [now_s] * len(self.engines)
        self._groups = {name: placement.groups_of(name) for name in setting.services}

    def add(self, request: SharedRequest, now_s: float) -> None:
        """Dispatch a request: section 3's least number of requests."""
        if not request.prompt:
            return
        groups = self._groups[request.service]
        for position in groups:
            self.engines[position].run_until(now_s)
        # A later one of equals gets it first: groups are listed from large to small.
        least = min(groups, key=lambda i: (self.engines[i].num_open, i))
        self.engines[least].add(request, max(now_s, self._ready_s[least]))

    def replaced(
        self, placement: Placement, now_s: float, load_s: Callable[[Group], float]
    ) -> SharedCluster:
        """The cluster with another placement; requests of groups that end go to the others.

        Args:
            placement: From now on; groups that it shares with the old one go on undisturbed.
            now_s: Groups that end do so after the step that is under way.
            load_s: Seconds after which a new group serves.
        """
        new = SharedCluster(self.setting, placement, now_s)
        left: dict[Group, list[int]] = {}
        for position, group in enumerate(self.placement.groups):
            left.setdefault(group, []).append(position)
        for position, group in enumerate(placement.groups):
            if left.get(group):
                old = left[group].pop()
                new.engines[position] = self.engines[old]
                new._ready_s[position] = self._ready_s[old]
            else:
                new._ready_s[position] = now_s + load_s(group)
        homeless = [
            request
            for positions in left.values()
            for position in positions
            for request in self.engines[position].withdraw(now_s)
        ]
        for request in sorted(homeless, key=lambda r: (r.arrival_s, r.req_id)):
            new.add(request, now_s)
        return new

    def run_until(self, now_s: float) -> None:
        """Advance every group."""
        for engine in self.engines:
            engine.run_until(now_s)

    def run(self, requests: Sequence[SharedRequest]) -> list[SharedRequest]:
        """Serve the requests, sorted by arrival, until each has ended; they are returned."""
        for request in requests:
            self.add(request, request.arrival_s)
        for engine in self.engines:
            while engine.num_open:
                engine.advance()
        return list(requests)


class Evaluator:
    """What a placement does to past requests: the search's simulator (Algorithm 1, lines 9, 20).

    The requests of a service in several groups are dealt out to them in turn, so that groups do
    not depend on each other and each is simulated once, however many placements hold it. Serving
    itself sends a request to the group with the fewest.

    Args:
        setting: The cluster.
        arrivals: Past requests.
    """

    def __init__(self, setting: Setting, arrivals: Sequence[Arrival]) -> None:
        self._setting, self._arrivals = setting, list(arrivals)
        self._own: dict[str, list[SharedRequest]] = {name: [] for name in setting.services}
        self._known: dict[object, dict[str, ServiceOutcome]] = {}
        for request in setting.requests(arrivals):
            self._own[request.service].append(request)

    def __call__(self, placement: Placement) -> dict[str, ServiceOutcome]:
        """See `Evaluate`."""
        homes = {name: placement.groups_of(name) for name in self._setting.services}
        totals = {
            name: [len(own), 0 if homes[name] else len(own), 0.0] for name, own in self._own.items()
        }
        for position, group in enumerate(placement.groups):
            shares = tuple(
                (name, homes[name].index(position), len(homes[name])) for name in group.services
            )
            for name, outcome in self._group(group, shares).items():
                totals[name][1] += outcome.num_missed
                totals[name][2] += outcome.latency
        return {name: ServiceOutcome(int(n), int(m), s) for name, (n, m, s) in totals.items()}

    def _group(
        self, group: Group, shares: tuple[tuple[str, int, int], ...]
    ) -> dict[str, ServiceOutcome]:
        """Outcomes of one group's share of each of its services, for (name, i, n) the i-th of n."""
        key = (group.degree, shares)
        if key not in self._known:
            engine = self._setting.engine(group)
            mine = [_fresh(request) for name, i, n in shares for request in self._own[name][i::n]]
            taken = [request for request in mine if request.prompt]
            for request in sorted(taken, key=lambda r: (r.arrival_s, r.req_id)):
                engine.run_until(request.arrival_s)
                engine.add(request, request.arrival_s)
            while engine.num_open:
                engine.advance()
            outcomes = self._setting.outcomes(mine)
            self._known[key] = {name: outcomes[name] for name in group.services}
        return self._known[key]


def _fresh(request: SharedRequest) -> SharedRequest:
    return SharedRequest(
        request.req_id,
        request.service,
        request.arrival_s,
        request.prompt,
        request.output,
        request.deadline_s,
        request.ttft_s,
        request.tpot_s,
    )
