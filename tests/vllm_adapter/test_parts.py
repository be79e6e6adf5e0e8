"""The scheduler is put together from parts that own their state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import sola_sched
from sola_sched import front_end, vllm_adapter
from sola_sched.vllm_adapter.names import SCHEDULER

pytestmark = pytest.mark.vllm

FOLDERS = [Path(str(package.__file__)).parent for package in (vllm_adapter, front_end)]
#: Around the engine, where vLLM has no hook.
PLUGIN = ("plugin", "request_checks")
#: vLLM's own, which its scheduler may have or not.
OPTIONAL = ("_request_blocks_can_be_freed", "_handle_blocked_waiting_request",
            "_try_promote_blocked_waiting_request")  # fmt: skip

#: Public methods of named tuples.
OF_TUPLES = ("_asdict", "_replace")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(path for folder in FOLDERS for path in folder.glob("*.py")):
        if not path.stem.startswith(PLUGIN):
            yield path.stem, ast.parse(path.read_text(encoding="utf-8"))


def private(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Private attributes of another object than the method's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_host = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if not (is_own or is_host or node.attr.startswith("__")):
                yield node


def test_no_part_reaches_into_another() -> None:
    theirs = {*SCHEDULER.steering, *SCHEDULER.swapping, *OPTIONAL, *OF_TUPLES}
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in trees()
        for node in private(tree)
        if node.attr not in theirs
    ]

    assert found == []


def test_an_attribute_of_another_part_would_be_found() -> None:
    tree = ast.parse("self._own = self._steering._hidden + scheduler.running + super()._hook()")

    assert [node.attr for node in private(tree)] == ["_hidden"]


def test_one_class_alone_is_vllms_scheduler() -> None:
    """All else that has a constructor is a part of it, and shares no `self` with others."""
    bases = [
        (name, node.name, [ast.unparse(base) for base in node.bases])
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]

    of_scheduler = [(name, cls) for name, cls, of in bases if {"_Host", "AsyncScheduler"} & {*of}]
    assert of_scheduler == [("scheduler", "SolaSchedulerMixin"), ("scheduler", "Scheduler")]


def test_no_instance_is_rewritten() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__dict__"
    ]

    assert found == []


def test_parts_without_their_options_are_not_there() -> None:
    scheduler = make_small_engine(sola_sched.Scheduler, {}).scheduler

    assert scheduler._turns is None
    assert scheduler._swapping is None


# One class for both modes ---------------------------------------------------------------------


class Mine(sola_sched.Scheduler):
    """A user's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_scheduled = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.num_scheduled += output.total_num_scheduled_tokens
        return output


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("cls", [sola_sched.Scheduler, Mine])
def test_a_scheduler_is_of_its_class_in_both_modes(cls: type[Any], is_async: bool) -> None:
    schedulers = [make_small_engine(cls, {}, async_scheduling=is_async).scheduler for _ in range(2)]
    first, second = schedulers

    assert isinstance(first, cls)
    assert type(first) is type(second)
    assert (type(first) is cls) == is_async
    assert (type(first).__module__, type(first).__qualname__) == (cls.__module__, cls.__qualname__)
    expected = AsyncScheduler if is_async else Scheduler
    found = type(first)._update_after_schedule
    assert found is expected._update_after_schedule


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_users_class_calls_its_bases_in_both_modes(is_async: bool) -> None:
    engine = make_small_engine(Mine, {}, async_scheduling=is_async)
    workload = make_workload(20, 10.0)

    engine.run(workload)

    assert engine.scheduler.num_scheduled >= sum(r.prompt_len or 0 for r in workload) > 0
