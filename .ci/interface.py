"""Reads a vLLM wheel and checks, without installing it, that what sola_sched steers is there.

python .ci/interface.py vllm-0.33.0-*.whl
"""

from __future__ import annotations

import ast
import sys
import zipfile

from sola_sched.vllm_compat import Seams, check_version

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
ASYNC_SCHEDULER = "vllm/v1/core/sched/async_scheduler.py"
#: File, class and method of vLLM's parameter checks that the plug-in extends.
CHECKS = [
    ("vllm/v1/engine/input_processor.py", "InputProcessor", "_validate_params"),
    ("vllm/v1/engine/async_llm.py", "AsyncLLM", "__init__"),
    ("vllm/sampling_params.py", "SamplingParams", "_verify_args"),
]

#: Positional parameters, after self, that our calls and overrides rely on.
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
#: What the scheduler reads beyond `Seams`.
ATTRIBUTES = ("vllm_config", "num_spec_tokens", "block_size", "kv_cache_config", "lora_config")


def members(tree: ast.Module, name: str) -> tuple[set[str], dict[str, list[str]]]:
    """Attributes assigned to `self` and methods with their parameters, of class `name`."""
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = {}
    for node in body.body:
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in node.args.args]
            methods[node.name] = names[1:] if names[:1] == ["self"] else names
    assigned = {
        n.attr
        for n in ast.walk(body)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    return assigned, methods


def problems(wheel: zipfile.ZipFile) -> list[str]:
    """What is missing or different, in words."""
    found = []
    assigned, methods = members(ast.parse(wheel.read(SCHEDULER)), "Scheduler")
    for name in (*Seams._NEEDED, *ATTRIBUTES):
        if name not in assigned and name not in methods:
            found.append(f"Scheduler has no {name}")
    for name, expected in PARAMETERS.items():
        if methods.get(name) != expected:
            found.append(f"Scheduler.{name} takes {methods.get(name)}, not {expected}")
    if not {"skipped_waiting", "kv_holding_waiting"} & assigned:
        found.append("Scheduler has neither skipped_waiting nor kv_holding_waiting")
    members(ast.parse(wheel.read(ASYNC_SCHEDULER)), "AsyncScheduler")
    for file, owner, name in CHECKS:
        if name not in members(ast.parse(wheel.read(file)), owner)[1]:
            found.append(f"{owner} has no {name}")
    return found


def main(path: str) -> int:
    """Print the outcome for the wheel at `path`; 0 if everything is there."""
    version = path.rsplit("/", 1)[-1].split("-")[1]
    check_version(version)
    with zipfile.ZipFile(path) as wheel:
        found = problems(wheel)
    print("\n".join(found) or f"vLLM {version}: everything that is steered is there")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
