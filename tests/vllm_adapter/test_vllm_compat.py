"""The version range and its errors; no vLLM is needed here."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from sola_sched.errors import IncompatibleVllmError
from sola_sched.vllm_adapter import versions
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots
from sola_sched.vllm_adapter.versions import TRY, Seams, check_version

#: The status of a request whose grammar is being compiled.
GRAMMAR = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"


@pytest.fixture(autouse=True)
def _nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.ci/versions --try` runs these tests too."""
    monkeypatch.delenv(TRY, raising=False)


@pytest.mark.parametrize("version", ["0.28.0", "0.31.2", "0.32.0+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    assert check_version(version)[0] == 0


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range_and_a_way_out(version: str) -> None:
    with pytest.raises(IncompatibleVllmError, match=r"0\.28 to 0\.33 \(found vLLM .*pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0+cpu", "0.34.1rc1"])
def test_a_version_that_the_environment_names_is_tried_and_the_log_says_so(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRY, version[:4])
    said: list[str] = []
    monkeypatch.setattr(versions.logger, "warning", lambda text, *args: said.append(text % args))

    assert check_version(version) == (0, int(version[2:4]))
    assert said == [f"vLLM {version} is not supported; it is tried because {TRY} says so."]


@pytest.mark.parametrize("named", ["0.35", "34", "any", ""])
def test_no_version_is_tried_but_the_one_that_the_environment_names(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRY, named)

    for version in ("0.34.0", "dev"):
        with pytest.raises(IncompatibleVllmError):
            check_version(version)


def test_a_scheduler_without_the_seams_is_refused_by_their_names() -> None:
    with pytest.raises(IncompatibleVllmError, match=r"Scheduler\.running, Scheduler\.waiting"):
        Seams(SimpleNamespace())


@pytest.mark.parametrize("queue", ["kv_holding_waiting", "skipped_waiting"])
@pytest.mark.parametrize(("num_computed", "allowed"), [(0, [1, None, 2, 2]), (64, [1, None])])
def test_adapters_of_those_that_hold_kv_count(
    queue: str, num_computed: int, allowed: list[int | None]
) -> None:
    """A held request keeps its adapter's slot, and one that waits with KV, for its grammar too."""
    parked = a_request("parked", adapter=3, status=GRAMMAR, num_computed_tokens=num_computed)
    seams = seams_with(queue, Queue([parked]), adapter=1)

    slots = AdapterSlots(seams._scheduler, seams)
    found = slots.within(a_request("new", adapter=n) for n in (1, None, 2, 4, 2))

    assert [r.lora_request and r.lora_request.lora_int_id for r in found] == allowed


@pytest.mark.parametrize(("adapter", "is_late"), [(None, False), (1, False), (3, True)])
def test_who_waits_for_a_grammar_takes_no_adapter_slot_without_a_plan(
    adapter: int | None, is_late: bool
) -> None:
    """Up to 0.30 vLLM would start it as soon as the grammar is there, beside held requests."""
    compiling = a_request("compiling", adapter=adapter, status=GRAMMAR)
    seams = seams_with("skipped_waiting", Queue([compiling]), adapter=1)

    active, late = AdapterSlots(seams._scheduler, seams).count()

    assert active == {1}
    assert [*late] == [compiling] * is_late


class Queue(list[SimpleNamespace]):
    """As much of vLLM's queues as setting apart needs; `fails` after half of a removal."""

    fails = False

    def remove_requests(self, requests: list[SimpleNamespace]) -> None:
        for request in list(requests):
            if request in self:
                self.remove(request)
            if self.fails:
                raise RuntimeError("injected")

    def prepend_requests(self, requests: Iterable[SimpleNamespace]) -> None:
        for request in requests:
            self.insert(0, request)


def seams_with(queue: str, drained_first: Queue, adapter: int | None = None) -> Seams:
    """Seams where all wait in the queue that vLLM drains first, but one, and one with `adapter`."""
    seams = object.__new__(Seams)
    seams._has_skipped = queue == "skipped_waiting"
    seams.apart = []
    waiting = Queue([a_request("waiting")])
    seams._scheduler = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=2),
        running=[a_request("running", adapter=adapter)],
        waiting=waiting,
        deferred_waiting=set(),
        finished_recving_kv_req_ids=set(),
        requests={request.request_id: request for request in (*drained_first, *waiting)},
        **{queue: drained_first},
    )
    return seams


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def a_request(
    name: str, *, adapter: int | None = None, status: str = "WAITING", num_computed_tokens: int = 0
) -> Request:
    return Request(
        request_id=name,
        status=SimpleNamespace(name=status),
        num_computed_tokens=num_computed_tokens,
        lora_request=None if adapter is None else SimpleNamespace(lora_int_id=adapter),
        is_finished=lambda: False,
    )


@pytest.mark.parametrize("queue", ["kv_holding_waiting", "skipped_waiting"])
def test_who_is_set_apart_has_a_place_and_may_leave_it(queue: str) -> None:
    drained_first = Queue(map(a_request, "abc"))
    a, b, c = drained_first
    seams = seams_with(queue, drained_first)

    seams.set_apart([a, c])
    assert drained_first == [b]
    assert seams.is_waiting(a)
    assert [request.request_id for request in seams.without_place()] == ["waiting"]
    seams.take_out(a)
    assert not seams.is_waiting(a)
    seams.put_back()

    assert drained_first == [c, b]
    assert seams.apart == []


@pytest.mark.parametrize("queue", ["kv_holding_waiting", "skipped_waiting"])
def test_setting_apart_that_fails_on_its_way_loses_nobody(queue: str) -> None:
    drained_first = Queue(map(a_request, "abc"))
    a, b, c = drained_first
    seams = seams_with(queue, drained_first)
    drained_first.fails = True

    with pytest.raises(RuntimeError, match="injected"):
        seams.set_apart([a, c])
    seams.put_back()

    assert drained_first == [a, b, c]
