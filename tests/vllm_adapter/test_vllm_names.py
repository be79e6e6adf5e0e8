"""What we touch of vLLM is found by reading the source, listed once, and checked at start."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import interface
import vllm
import vllm_use
from needs import NEEDS_SWAPPING
from sources import Class, World
from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.errors import IncompatibleVllmError
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.names import EITHER, PARTS, SCHEDULER, Part, lacking
from sola_sched.vllm_adapter.swap import swapping

pytestmark = pytest.mark.vllm

PACKAGES = Path(vllm.__file__).parents[1]
TOOLS = ("sola_sched.bench", "sola_sched.simulator", "sola_sched.profile", "sola_sched.serving")
#: Programs, and what runs in the API server's process.
PLUGINS = ("sola_sched.vllm_adapter.plugin", "sola_sched.vllm_adapter.swap.plugin_swap")
OUTSIDE_A_STEP = (*TOOLS, *PLUGINS, "sola_sched.front_end")


@pytest.fixture(scope="module")
def world() -> World:
    return vllm_use.make_world(vllm_use.installed(PACKAGES))


@pytest.fixture(scope="module")
def scan(world: World) -> tuple[set[vllm_use.Use], set[tuple[str, str]]]:
    return vllm_use.uses(world)


# What the source touches ----------------------------------------------------------------------


def test_the_installed_vllm_has_everything_that_our_source_touches(world, scan) -> None:
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    found = scan[0] | vllm_use.imports(world)

    assert len(found) > 300
    assert interface.problems(world, version, found) == []


@NEEDS_SWAPPING  # types are followed through a vLLM that has all of it
def test_it_is_known_whose_attributes_a_step_reads(world, scan) -> None:
    """Or a name of vLLM could be touched unseen; `vllm_known.BY_NAME` tells types by names."""
    unclear = vllm_use.unclear(*scan, world)

    assert [place for place in unclear if not place.startswith(TOOLS)] == []


@NEEDS_SWAPPING  # types are followed through a vLLM that has all of it
def test_the_list_has_the_names_that_a_step_touches_and_no_others(world, scan) -> None:
    steps = {use for use in scan[0] if not use.where.startswith(OUTSIDE_A_STEP)}
    steering = {use for use in steps if not vllm_use.is_of_swapping(use)}
    either = {name for group in EITHER for name in group}

    def is_listed(use: vllm_use.Use, names: Callable[[Part], tuple[str, ...]]) -> bool:
        owner = world.class_at(use.owner)
        assert owner is not None
        parts = [part for part in PARTS if use.name in names(part)]
        return any(are_related(owner, world.class_at(part.owner)) for part in parts)

    def are_used(part: Part, names: tuple[str, ...], found: set[vllm_use.Use]) -> list[str]:
        owner = world.class_at(part.owner)
        used = {u.name for u in found if are_related(world.class_at(u.owner), owner)}
        return [f"{part.owner}.{name}" for name in names if name not in used]

    def are_related(one: Class | None, other: Class | None) -> bool:
        return one is not None and other is not None and (one in other.mro or other in one.mro)

    needed = [use for use in steering if not use.is_optional and use.name not in either]
    assert [str(u) for u in needed if not is_listed(u, lambda p: p.steering)] == [], "to be listed"
    needed = [use for use in steps - steering if not use.is_optional]
    everything = [u for u in needed if not is_listed(u, lambda p: p.steering + p.swapping)]
    assert [str(u) for u in everything if not is_enum(world, u)] == [], "to be listed"
    stale = [name for part in PARTS for name in are_used(part, part.steering, steering)]
    stale += [name for part in PARTS for name in are_used(part, part.swapping, steps)]
    assert stale == [], "touched no more"


def is_enum(world: World, use: vllm_use.Use) -> bool:
    """The connector's role and its metadata are imported with the connector, before any step."""
    return use.owner.endswith(("KVConnectorRole", "KVConnectorWorkerMetadata"))


@NEEDS_SWAPPING  # types are followed through a vLLM that has all of it
def test_a_new_use_and_a_rename_are_found_by_themselves() -> None:
    def read(path: str) -> str | None:
        text = vllm_use.installed(PACKAGES)(path)
        if path.endswith("block_pool.py"):
            assert text is not None
            return text.replace("def get_num_free_blocks", "def count_free_blocks")
        return text

    world = vllm_use.make_world(read)
    ours = world._read

    def with_a_new_use(path: str) -> str | None:
        text = ours(path)
        if path == "sola_sched/vllm_adapter/swap/swapping_ahead.py":
            assert text is not None
            line = "connector, manager = self._swapping.connector, scheduler.kv_cache_manager\n"
            assert line in text
            return text.replace(line, f"{line}        manager.brand_new(1)\n")
        return text

    world._read = with_a_new_use
    missing = vllm_use.lacks(vllm_use.uses(world)[0], world)
    names = {(use.owner.rpartition(".")[2], use.name) for use in missing if "stub" not in use.owner}

    assert {("BlockPool", "get_num_free_blocks"), ("KVCacheManager", "brand_new")} <= names
    assert names - {("Scheduler", "skipped_waiting")} == {
        ("BlockPool", "get_num_free_blocks"),
        ("KVCacheManager", "brand_new"),
    }


# At start -------------------------------------------------------------------------------------


def test_a_name_that_none_of_its_modules_has_is_found() -> None:
    """What releases have in different modules is imported from the first that is there."""
    places = [f"vllm/entrypoints/{each}/cli_args.py" for each in ("common", "launchers", "openai")]
    read_installed = vllm_use.installed(PACKAGES)

    def world_with(place: str | None) -> World:
        def read(path: str) -> str | None:
            if path in places:
                both = "make_arg_parser = 1\nvalidate_parsed_serve_args = 2\n"
                return both if path == place else None
            return read_installed(path)

        return vllm_use.make_world(read)

    for place in places:
        assert vllm_use.lacking_choices(world_with(place)) == []
    missing = vllm_use.lacking_choices(world_with(None))
    assert [line.split(", ")[0].rpartition(".")[2] for line in missing] == [
        "make_arg_parser", "validate_parsed_serve_args"
    ]  # fmt: skip
    assert "vllm.entrypoints.openai.cli_args.make_arg_parser (sola_sched.serving" in missing[0]


def without(part: Part, name: str, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Our scheduler on a vLLM in which one name is gone."""
    module, _, owner = part.owner.rpartition(".")
    if part.at is None:
        names = {other for p in PARTS if p is part for other in p.steering + p.swapping}
        rest = type(owner, (), dict.fromkeys(names - {name}))
        monkeypatch.setattr(importlib.import_module(module), owner, rest)
        return sola_sched.Scheduler

    class Renamed(AsyncScheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Parts of the configuration are shared with other engines.
            self.vllm_config = copy.copy(self.vllm_config)
            for shared in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
                setattr(self.vllm_config, shared, copy.copy(getattr(self.vllm_config, shared)))
            target = attrgetter(part.at)(self) if part.at else self
            if name in vars(target):
                delattr(target, name)
            for cls in type(target).__mro__:
                if name in vars(cls) and not cls.__module__.startswith("sola_sched"):
                    monkeypatch.delattr(cls, name)

    return type("Mine", (sola_sched.SolaSchedulerMixin, Renamed), {})


def link() -> Any:
    """Imported here: older vLLMs lack what the connector imports."""
    from sola_sched.simulator.swap_link import LinkSpeed

    return LinkSpeed(1 << 16, 1e10)


def start(scheduler_cls: type[Any], **options: Any) -> VirtualEngine:
    return VirtualEngine(
        scheduler_cls,
        model=TINY_MODEL,
        num_blocks=129,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        step_time=StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4),
        **options,
    )


#: Not in this engine, or vLLM's own constructor would fail first.
NOT_HERE = ("LoRAConfig", "KVTransferConfig", "SchedulingPolicy")
STEERING = [(p, name) for p in PARTS if not p.owner.endswith(NOT_HERE) for name in p.steering]


@pytest.mark.parametrize(("part", "name"), STEERING, ids=[n for _, n in STEERING])
def test_a_vllm_without_one_name_is_refused_at_start(part, name, monkeypatch) -> None:
    scheduler_cls = without(part, name, monkeypatch)

    with pytest.raises(IncompatibleVllmError, match=rf"vLLM must have .*\b{name}\b.*unmodified"):
        start(scheduler_cls)


SCHEDULERS = [name for name in SCHEDULER.swapping if name not in EITHER[1]]


@NEEDS_SWAPPING
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_vllm_without_a_name_of_swapping_does_not_swap(name, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(swapping.logger, "warning", lambda text, *args: said.append(text % args))

    engine = start(without(SCHEDULER, name, monkeypatch), swap_link=link())

    assert said == [
        "sola_sched: KV is not swapped, preempted requests are computed again: this vLLM has no "
        f"Scheduler.{name}"
    ]
    assert engine.scheduler.sola_swap is None
    assert engine.scheduler.connector.manager is None


@NEEDS_SWAPPING
@pytest.mark.parametrize("is_there", [True, False])
def test_without_swapping_the_same_requests_are_served(is_there, monkeypatch) -> None:
    """The name is gone from vLLM's class as the check sees it; the steps go on without it."""
    part = next(part for part in PARTS if part.owner.endswith(".Request"))
    if not is_there:
        without(part, "shared_prefix_boundary", monkeypatch)
    requests = [
        VirtualRequest(f"r{i}", arrival_s=0.0, prompt_len=200, output_len=100) for i in range(30)
    ]

    engine = start(sola_sched.Scheduler, swap_link=link())
    records = engine.run(requests)

    assert [r.num_output_tokens for r in records] == [100] * 30
    assert sum(r.num_preemptions for r in records) > 0
    assert engine.num_free_blocks == 128
    assert ("swap" in engine.scheduler.sola_stats()) == is_there


def test_an_unmodified_vllm_lacks_nothing() -> None:
    assert lacking() == []
    assert lacking(start(sola_sched.Scheduler).scheduler) == []


def test_nobody_has_looked_at_the_dict_of_what_vllm_asks_for_every_request() -> None:
    """Python before 3.13 then finds the attributes of the instance more slowly ever after."""
    manager = start(sola_sched.Scheduler).scheduler.kv_cache_manager

    for instance in (manager, manager.coordinator, manager.block_pool):
        held = gc.get_referents(instance)
        assert not any(isinstance(each, dict) and "kv_cache_config" in each for each in held)
        assert not any(isinstance(each, dict) and "num_gpu_blocks" in each for each in held)
