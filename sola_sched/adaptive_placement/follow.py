"""The loop: what is deployed, what has come, what is decided, and the steps to it.

What is deployed is read from Serve each time, so that a controller that starts anew goes on where
another has stopped. Of a description that cannot be used nothing is changed: the service stays as
it is, or is not added, and the log says why.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from sola_sched.adaptive_placement.observe import Observed, Observer
from sola_sched.adaptive_placement.search import Options, Search
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.adaptive_placement.state import State
from sola_sched.cluster.sharing.controller import Controller
from sola_sched.cluster.sharing.placement import Placement
from sola_sched.cluster.sharing.seats import Move, Seat, moves, seat
from sola_sched.cluster.sharing.unserved import Score
from sola_sched.config.flags import url_of
from sola_sched.errors import ConfigError, DeploymentError, InfeasibleError
from sola_sched.plan.inputs.descriptions import make_service
from sola_sched.plan.outputs.deploy import (
    LOOPBACK,
    Application,
    admin_port_of,
    description,
    engine_applications,
    engines_of,
    gateway_application,
    gateways_of,
    names_of,
    place_of,
    ports,
    service_of,
)
from sola_sched.simulator.sharing.cluster import Arrival, Setting

logger = logging.getLogger(__name__)

Description = Mapping[str, Any]
#: Seconds that an engine takes to start, until one has been seen.
_START_S = 60.0
_POLL_S, _AGAIN_S = 2.0, 10.0


class Follower:
    """Keeps Serve's applications those of the best placement.

    Args:
        api: Serve's.
        read: The services' descriptions, keys as for `plan`, as JSON text; read again and again.
        options: What is placed on.
        interval_s: The first interval.
        observer: Of what has come.
        limit_s: Most that an engine may take to start or stop.
        clock, sleep: For tests.
    """

    def __init__(
        self,
        api: ServeApi,
        read: Callable[[], str],
        options: Options,
        *,
        interval_s: float = 600.0,
        observer: Observer | None = None,
        limit_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api, self._read, self._options = api, read, options
        self._observer = observer or Observer(clock=clock)
        self._limit_s, self._clock, self._sleep = limit_s, clock, sleep
        self._controller: Controller[Sequence[Arrival]] = Controller(
            Score(0.0, 1.0), interval_s=interval_s, num_gpus=options.cluster.num_gpus
        )
        self._text = ""
        self._wanted: dict[str, Description] = {}
        self._good: dict[str, Description] = {}
        self._observed: dict[str, Observed] = {}
        self._span_s = interval_s
        self._start_s = _START_S
        self._begin_s = clock()
        #: Whether the descriptions have changed, and nothing has been decided on since.
        self._is_changed = False
        #: Whether an interval has ended, and nothing has been decided on since.
        self._is_over = False
        #: Share of requests that met their targets in that interval; None if it is not known.
        self._real: float | None = None
        #: The placement that has been decided on; None once it is in place.
        self._decided: Placement | None = None
        self._is_halted = self._has_baseline = False

    @property
    def interval_s(self) -> float:
        """The interval that runs."""
        return self._controller.interval_s

    def run(self) -> None:
        """Follow for ever; trouble with Serve is logged and tried again."""
        while True:
            pause_s = _POLL_S
            try:
                self.tick()
            except (ConfigError, InfeasibleError) as error:
                logger.error("nothing is changed: %s", error)
            except DeploymentError as error:
                logger.error("%s", error)
                pause_s = _AGAIN_S
            self._sleep(pause_s)

    def tick(self) -> None:
        """Act if descriptions have changed, or the interval is over.

        Raises:
            DeploymentError: Serve does not do what it was asked for.
            InfeasibleError: There is no placement; everything is as before.
        """
        if not self._has_baseline:  # what engines have counted so far is no load of an interval
            if gateways := self._gateways():
                self._observer.since_last(gateways)
            self._has_baseline = True
        if self._take_in():
            self._is_changed, self._is_halted = True, False
        elif self._is_halted:
            return
        now_s = self._clock()
        if now_s >= self._begin_s + self.interval_s:
            self._real = self._observe()
            self._span_s, self._begin_s = max(1.0, now_s - self._begin_s), now_s
            self._is_over = True
        if not (self._is_changed or self._is_over or self._decided):
            return
        try:
            self._place()
        except DeploymentError as error:
            # An engine that has failed is tried again at the end of the interval, Serve soon: what
            # was to be done is to be done yet.
            if error.applications:
                self._decided = None
            raise
        except (ConfigError, InfeasibleError):
            self._is_changed = self._is_over = False
            self._decided = None
            raise

    # Descriptions.

    def _take_in(self) -> bool:
        """Read the descriptions; whether some that can be used have changed."""
        try:
            text = self._read()
        except (OSError, ValueError) as error:
            logger.error("descriptions of services must be read (%s); nothing is changed", error)
            return False
        if text == self._text:
            return False
        self._text = text
        try:
            listed = json.loads(text)
            if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                raise ConfigError("descriptions must be a list of objects")
            names = [str(one.get("name")) for one in listed]
            if len(set(names)) < len(names):
                raise ConfigError(f"'name' of a service must be unique (got {sorted(names)})")
            names_of(names)
        except (ValueError, RecursionError) as error:
            logger.error("descriptions of services cannot be used (%s); nothing is changed", error)
            return False
        wanted: dict[str, Description] = {}
        for one in listed:
            name = str(one.get("name"))
            try:
                make_service(one, self._options.seed)
            except ValueError as error:  # whatever is wrong with one, the others are followed
                before = self._wanted.get(name)
                done = "stays as it is" if before is not None else "is not added"
                logger.error("service %r %s: %s", name, done, error)
                if before is not None:
                    wanted[name] = before
                continue
            wanted[name] = one
        is_changed = wanted != self._wanted
        self._wanted = wanted
        return is_changed

    # Placing.

    def _observe(self) -> float | None:
        """Take in what has come; the share that met its targets, None without any."""
        self._observed = self._observer.since_last(self._gateways())
        met = sum(one.num_met for one in self._observed.values())
        judged = sum(one.num_judged for one in self._observed.values())
        return met / judged if judged else None

    def _deployed(self) -> list[Application]:
        """What is deployed.

        Raises:
            DeploymentError: An application of ours is not as `plan` writes it.
        """
        deployed = self._api.deployed()
        for one in deployed:
            try:
                for engine in engines_of([one]).values():
                    description(engine)
                for gateway in gateways_of([one]).values():
                    int(gateway["args"]["port"])
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise DeploymentError(
                    f"application {one['name']!r} must be as `plan` writes it (got {error!r}); "
                    "remove it from Serve."
                ) from error
        return deployed

    def _gateways(self) -> dict[str, str]:
        """URLs of the services' gateways, those for operators."""
        gateways = {}
        details = self._api.details()
        for service, application in gateways_of(self._deployed()).items():
            replicas = [
                replica
                for each in details.get(application["name"], {}).get("deployments", {}).values()
                for replica in each.get("replicas", [])
            ]
            if replicas:
                host = application["args"].get("host")
                if host in (None, "0.0.0.0", "::"):
                    host = replicas[0].get("node_ip") or LOOPBACK
                port = int(application["args"]["port"])
                gateways[service] = url_of(host, admin_port_of(port))
        return gateways

    def _place(self) -> None:
        """Decide where the services go, unless that is decided, and see to it."""
        if not self._wanted:
            logger.warning("no service is described that can be used: nothing is changed")
            self._is_changed = self._is_over = False
            self._decided = None
            return
        state = State(self._deployed())
        placer = Search(self._wanted, self._observed, self._span_s, self._options, self._start_s)
        changed = state.changed(placer.setting)
        for name in state.services - changed:
            if name in self._wanted:
                self._good.setdefault(name, self._wanted[name])
        if self._is_changed or self._is_over or self._decided is None:
            self._decided = self._decide(state, placer, bool(changed))
            self._is_changed = self._is_over = False
        self._move(state, self._decided, placer.setting, changed)
        self._decided = None
        self._observer.begin(self._wanted)

    def _decide(self, state: State, placer: Search, is_other: bool) -> Placement:
        """The controller's placement for the services."""
        now = Placement(tuple(one.group for one in state.seats))
        may_stay = self._is_over and not (self._is_changed or is_other)
        if may_stay and state.services == set(self._wanted):
            decision = self._controller.end_interval(now, self._real, placer.past, placer)
        else:
            decision = self._controller.services_changed(placer.past, placer, self._is_whole, now)
        logger.info("%s; next interval %.0f s", decision.reason, self.interval_s)
        return decision.placement

    def _is_whole(self, placement: Placement) -> bool:
        served = {name for group in placement.groups for name in group.services}
        return served == set(self._wanted)

    # Moving.

    def _move(
        self, state: State, placement: Placement, setting: Setting, changed: set[str]
    ) -> None:
        seats = seat(placement, self._options.cluster, state.seats, changed)
        fresh = engine_applications(seats, setting)
        leaving = [one for name, one in state.gateways.items() if name not in self._wanted]
        if leaving:  # what is in flight there may end while its engines run
            self._change(state, leaving, [])
        taken = {name: int(one["args"]["port"]) for name, one in state.gateways.items()}
        for name, port in ports(sorted(self._wanted), taken, self._options.first_port).items():
            if name not in taken:
                state.add(gateway_application(name, port, self._options.host))
        for stops, starts in _phases(moves(state.seats, seats, changed)):
            places = {place_of(one) for one in starts}
            stopped = [one for place in stops for one in state.at(place)]
            begun = [one for one in fresh if one["name"].partition("--")[2] in places]
            try:
                self._change(state, stopped, begun)
            except DeploymentError as error:
                self._put_back(state, stopped, begun, error)
                raise
        self._api.wait({one["name"] for one in state.gateways.values()}, (), self._limit_s)
        self._good = dict(self._wanted)

    def _change(
        self, state: State, stopped: Sequence[Application], begun: Sequence[Application]
    ) -> None:
        """Stop some applications; when they are gone, start others."""
        if stopped:
            logger.info("stopping %s", _names(stopped))
            for one in stopped:
                state.remove(one)
            self._deploy(state)
            self._api.wait((), {one["name"] for one in stopped}, self._limit_s)
        if begun:
            logger.info("starting %s", _names(begun))
            for one in begun:
                state.add(one)
            began_s = self._clock()
            self._deploy(state)
            self._api.wait({one["name"] for one in begun}, (), self._limit_s)
            self._start_s = max(1.0, self._clock() - began_s)

    def _deploy(self, state: State) -> None:
        """Make Serve's applications ours of `state` and whatever others there are by now.

        To deploy is to replace all; others may have been added or taken away since the last look,
        as engines take minutes to start.
        """
        state.take_others(self._api.deployed())
        self._api.deploy(state.applications)

    def _put_back(
        self,
        state: State,
        stopped: Sequence[Application],
        begun: Sequence[Application],
        error: DeploymentError,
    ) -> None:
        """Undo a change, and give up new descriptions of services that could not start."""
        for one in begun:
            if one["name"] in error.applications:
                self._give_up(service_of(one), state)
        for one in (*begun, *stopped):
            state.remove(one)
        self._deploy(state)
        self._api.wait((), {one["name"] for one in begun}, self._limit_s)
        for one in stopped:
            state.add(one)
        self._deploy(state)

    def _give_up(self, name: str, state: State) -> None:
        before, now = self._good.get(name), self._wanted.get(name)
        if now is None or now == before:
            return  # it has run like this before: it is tried again at the end of the interval
        self._is_changed = True
        if before is not None:
            logger.error("service %r cannot start as it is described: it goes on as before", name)
            self._wanted[name] = before
        elif name in state.services_before:
            # It was deployed by somebody else, in another way than it is described.
            logger.error("service %r cannot start as it is described; correct that", name)
            self._is_halted = True
        else:
            logger.error("service %r cannot start as it is described and is not added", name)
            del self._wanted[name]
            state.remove(state.gateways[name])


def _phases(steps: Sequence[Move]) -> list[tuple[list[Seat], list[Seat]]]:
    """Runs of stops, each with the starts that come after it."""
    phases: list[tuple[list[Seat], list[Seat]]] = []
    for action, some in groupby(steps, key=lambda step: step.action):
        seats = [step.seat for step in some]
        if action == "stop" or not phases:
            phases.append((seats, []) if action == "stop" else ([], seats))
        else:
            phases[-1][1].extend(seats)
    return phases


def _names(applications: Sequence[Application]) -> str:
    return ", ".join(str(one["name"]) for one in applications)
