"""Reads another vLLM, without importing it, and checks that what sola_sched touches is there.

python .ci/interface.py .venv-0.33.0

What that is, `vllm_use` finds by reading our source beside the vLLM that is installed here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import vllm_use
from sources import World

from sola_sched.vllm_adapter.names import EITHER, SCHEDULER
from sola_sched.vllm_adapter.versions import check_version

#: Class and method of vLLM's parameter checks that the plug-in extends.
CHECKS = [
    ("vllm.v1.engine.input_processor.InputProcessor", "_validate_params"),
    ("vllm.v1.engine.async_llm.AsyncLLM", "__init__"),
    ("vllm.sampling_params.SamplingParams", "_verify_args"),
]
#: Positional parameters of the scheduler, after self, that our calls and overrides rely on.
PARAMETERS = {
    "schedule": ["throttle_prefills"],
    "update_from_output": ["scheduler_output", "model_runner_output"],
    "add_request": ["request"],
    "finish_requests": ["request_ids", "finished_status"],
    "_preempt_request": ["request", "timestamp", "drop_stale_output"],
    "_free_request": ["request", "delay_free_blocks"],
    "_enqueue_waiting_request": ["request"],
    "_is_blocked_waiting_status": ["status"],
    "has_requests": [],
}
FIRST_SWAPPING = (0, 32)


def touched() -> set[vllm_use.Use]:
    """What our modules use and import of vLLM, found beside the installed one."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    world = vllm_use.make_world(vllm_use.installed(Path(spec.origin).parents[1]))
    return vllm_use.uses(world)[0] | vllm_use.imports(world)


def problems(world: World, version: tuple[int, int], found: set[vllm_use.Use]) -> list[str]:
    """What the vLLM in `world` lacks or has otherwise, in words."""
    either = {name for group in EITHER for name in group}
    needed = {
        use
        for use in found
        if not (use.name in either and use.owner.endswith("Scheduler"))
        and (version >= FIRST_SWAPPING or not vllm_use.is_of_swapping(use))
    }
    said = [f"no {use}" for use in vllm_use.lacks(needed, world)]
    said += [f"none of {each}" for each in vllm_use.lacking_choices(world)]
    scheduler = world.class_at(SCHEDULER.owner)
    if scheduler is None:
        return said
    if not any(all(scheduler.has(name) for name in group) for group in EITHER):
        said.append("Scheduler has none of " + ", ".join(" and ".join(g) for g in EITHER))
    for name, expected in PARAMETERS.items():
        method = next((c.methods[name] for c in scheduler.mro if name in c.methods), None)
        names = [a.arg for a in method.args.args if a.arg != "self"] if method else None
        if names != expected:
            said.append(f"Scheduler.{name} takes {names}, not {expected}")
    for owner, name in CHECKS:
        cls = world.class_at(owner)
        if cls is None or not cls.has(name):
            said.append(f"no {owner}.{name}")
    return said


def check(folder: Path) -> list[str]:
    """As `problems`, of the vLLM that is installed in a virtualenv."""
    found = list(folder.glob("lib/python*/site-packages/vllm-*.dist-info"))
    if not found:
        raise SystemExit(
            f"{folder} must be a virtualenv with a vLLM of its own; .ci/release makes one"
        )
    info = found[0]
    version = check_version(info.name.removesuffix(".dist-info").split("-")[1])
    return problems(vllm_use.make_world(vllm_use.installed(info.parent)), version, touched())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: interface.py VIRTUALENV")
    said = check(Path(sys.argv[1]))
    print("\n".join(said) or "everything that is touched is there")
    sys.exit(bool(said))
