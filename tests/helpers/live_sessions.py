"""Streaming sessions of engines in virtual time: opening, sending on, and what must hold."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.simulator.host import make_request

PARKED = "WAITING_FOR_STREAMING_REQ"
#: From 0.31 on each turn has a limit of its own, and its last token is not kept, whatever is in
#: flight.
TURNS_ARE_APART = "max_tokens" in inspect.getsource(Scheduler._update_request_as_session)


def later_limit(first: int, own: int) -> int:
    """The limit of a later turn: up to 0.30 that of the session's first turn, not its own."""
    return own if TURNS_ARE_APART else first


def open_session(engine: VirtualEngine, request: VirtualRequest) -> None:
    """Add a request that waits for a next input when it has been answered."""
    engine.add(request)
    engine._requests[request.req_id].resumable = True


def send_next(
    engine: VirtualEngine,
    name: str = "session",
    *,
    prompt_len: int = 30,
    output_len: int = 5,
    max_tokens: int | None = None,
    is_last: bool = False,
    **options: Any,
) -> None:
    """The next input of a session, or with `is_last` word that there is none."""
    following = VirtualRequest(
        name, engine.clock.now, output_len, prompt_len=prompt_len, max_tokens=max_tokens, **options
    )
    request = make_request(following, engine.vllm_config, engine._block_hasher)
    request.resumable = not is_last
    engine.scheduler.add_request(request)


def places_of(scheduler: Any) -> dict[str, list[str]]:
    """The queues in which each request of a scheduler is."""
    names = ("running", "waiting", "kv_holding_waiting", "skipped_waiting")
    places: dict[str, list[str]] = {name: [] for name in scheduler.requests}
    for name in names:
        for request in getattr(scheduler, name, ()):
            places.setdefault(request.request_id, []).append(name)
    return places


def assert_each_has_one_place(scheduler: Any) -> None:
    """Every live request is in exactly one queue, which is that of its status; no other is."""
    for name, places in places_of(scheduler).items():
        request = scheduler.requests.get(name)
        assert request is not None, f"{name!r} has ended and is still in {places}"
        if request.is_finished():  # its blocks wait for a copy
            assert places == [], f"{name!r} has ended and is still in {places}"
            continue
        status = request.status.name
        assert len(places) == 1, f"{name!r} ({status}) is in {places or 'no queue'}"
        assert (places == ["running"]) == (status == "RUNNING"), f"{name!r} ({status}): {places}"
    num_parked = sum(r.status.name == PARKED for r in scheduler.requests.values())
    assert scheduler.num_waiting_for_streaming_input == num_parked
    deferred = getattr(scheduler, "deferred_waiting", set())
    waiting = [*scheduler.waiting, *getattr(scheduler, "kv_holding_waiting", ())]
    assert deferred.issubset(waiting), "a request that is gone is still deferred"
