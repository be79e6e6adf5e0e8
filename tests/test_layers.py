"""Import rules: the core knows nobody, leaves know the core, heavy packages have fixed doors.

The rules read the source with ``ast``, so an import inside a function or under ``TYPE_CHECKING``
counts like one at the top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ("kernels", "kv_swap", "length_predictor")

#: Modules above the core that may know vLLM or Ray.
EDGES = (
    "sola_sched.engine_facts",
    "sola_sched.kv_swap.connector",
    "sola_sched.plugin",
    "sola_sched.plugin_metrics",
    "sola_sched.plugin_options",
    "sola_sched.plugin_refusals",
    "sola_sched.plugin_swap",
    "sola_sched.profile",
    "sola_sched.router",
    "sola_sched.scheduler",
    "sola_sched.stat_logger",
    "sola_sched.swapping",
    "sola_sched.telemetry_sender",
    "sola_sched.vllm_compat",
    "sola_sched.vllm_names",
)
#: Programs built from everything below them; nothing below may import them.
ENTRIES = (
    "sola_sched.bench",
    "sola_sched.bench.*",
    "sola_sched.simulator",
    "sola_sched.simulator.*",
)
#: Loads its names on first use, so it may point at any layer; heavy packages stay out.
FACADE = "sola_sched"

CORE_THIRD_PARTY = {"numpy", "scipy"}
DOORS = {
    "vllm": (
        "sola_sched.bench.engine_backend*",
        "sola_sched.engine_facts",
        "sola_sched.kv_swap.connector",
        "sola_sched.plugin",
        "sola_sched.plugin_metrics",
        "sola_sched.plugin_refusals",
        "sola_sched.plugin_swap",
        "sola_sched.profile",
        "sola_sched.scheduler",
        "sola_sched.simulator",
        "sola_sched.simulator.*",
        "sola_sched.stat_logger",
        "sola_sched.swapping",
        "sola_sched.telemetry_sender",
        "sola_sched.vllm_compat",
    ),
    "ray": ("sola_sched.router",),
    "faiss": ("sola_sched.length_predictor.index",),
    "triton": ("sola_sched.kernels", "sola_sched.kernels.*"),
}
#: A leaf's package to the other leaves it may import.
LEAF_EXCEPTIONS = {"kv_swap": {"kernels"}}


def source_files() -> Iterator[tuple[str, bool, Path]]:
    """Yield the installed name of each module, whether it is a package, and its file."""
    for folder, prefix in [("sola_sched", "sola_sched"), *((x, f"sola_sched.{x}") for x in LEAVES)]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield ".".join((prefix, *(parts[:-1] if is_package else parts))), is_package, path


def imported_names(source: str, module: str, is_package: bool) -> set[str]:
    """Return the full dotted names that the source imports.

    ``from a import b`` gives ``a`` and ``a.b``, because ``b`` may be a module. A string that is
    passed to ``import_module`` or ``__import__`` counts as well.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0] if node.args else None
            if (
                called in {"import_module", "__import__"}
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
                and not first.value.startswith(".")
            ):
                names.add(first.value)
    return names


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns)


def layer(module: str) -> str:
    if module == FACADE:
        return "facade"
    if matches(module, EDGES):
        return "edge"
    if matches(module, ENTRIES):
        return "entry"
    if module.split(".")[1] in LEAVES:
        return "leaf"
    return "core"


def violations(module: str, names: set[str]) -> list[str]:
    """Return what the module imports against the rules, each as ``name: rule``."""
    own = layer(module)
    found = []
    for name in sorted(names):
        top = name.split(".")[0]
        if top in DOORS and not matches(module, DOORS[top]):
            found.append(f"{name}: {top} only in {', '.join(DOORS[top])}")
        elif top == "torch" and own in {"core", "facade"}:
            found.append(f"{name}: no torch in the core")
        elif top == "sola_sched" and name != FACADE:
            target = layer(name)
            if own == "core" and target != "core":
                found.append(f"{name}: the core imports the core only")
            elif own == "leaf" and target == "leaf":
                mine, other = module.split(".")[1], name.split(".")[1]
                if other != mine and other not in LEAF_EXCEPTIONS.get(mine, set()):
                    found.append(f"{name}: leaf {mine} may not import leaf {other}")
            elif own == "leaf" and target in {"edge", "entry"}:
                found.append(f"{name}: a leaf may not import what is above it")
            elif own == "edge" and target == "entry":
                found.append(f"{name}: a host edge may not import a program")
        elif (
            own in {"core", "facade"}
            and top != "sola_sched"
            and top not in sys.stdlib_module_names
            and top not in CORE_THIRD_PARTY
        ):
            found.append(f"{name}: the core uses the standard library, numpy and scipy only")
    return found


SOURCES = list(source_files())


@pytest.mark.parametrize(
    ("module", "is_package", "path"), SOURCES, ids=[module for module, _, _ in SOURCES]
)
def test_module_imports_point_down_only(module: str, is_package: bool, path: Path) -> None:
    names = imported_names(path.read_text(encoding="utf-8"), module, is_package)

    assert violations(module, names) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sola_sched.slo", "import vllm"),
        ("sola_sched.slo", "import torch"),
        ("sola_sched.slo", "import pandas"),
        ("sola_sched.slo", "def f():\n    from vllm.v1 import request"),
        ("sola_sched.slo", "importlib.import_module('faiss')"),
        ("sola_sched.slo", "from sola_sched import scheduler"),
        ("sola_sched.slo", "from . import scheduler"),
        ("sola_sched.planner.attain", "from ..scheduler import Scheduler"),
        ("sola_sched.planner.attain", "from sola_sched.kernels import reference"),
        ("sola_sched.planner.attain", "import sola_sched.bench.run"),
        ("sola_sched", "if TYPE_CHECKING:\n    import vllm"),
        ("sola_sched.kernels.reference", "import sola_sched.kv_swap"),
        ("sola_sched.kernels.reference", "import sola_sched.scheduler"),
        ("sola_sched.kv_swap.host_pool", "import triton"),
        ("sola_sched.kv_swap.host_pool", "import vllm"),
        ("sola_sched.length_predictor.embed", "import faiss"),
        ("sola_sched.router", "import vllm"),
        ("sola_sched.scheduler", "import ray"),
        ("sola_sched.scheduler", "import sola_sched.simulator.engine"),
        ("sola_sched.bench.report", "import vllm"),
    ],
)
def test_rule_rejects_an_upward_or_heavy_import(module: str, source: str) -> None:
    assert violations(module, imported_names(source, module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sola_sched.planner.attain", "import numpy, scipy.optimize, heapq"),
        ("sola_sched.planner.attain", "from ..state import StepState"),
        ("sola_sched.kernels.int8_kv", "import torch, triton"),
        ("sola_sched.kv_swap.transfer", "from sola_sched.kernels import int8_kv"),
        ("sola_sched.kv_swap.connector", "import vllm"),
        ("sola_sched.length_predictor.index", "import faiss"),
        ("sola_sched.scheduler", "import vllm\nimport sola_sched.planner"),
        ("sola_sched.bench.engine_backend_cpu", "import vllm"),
        ("sola_sched.simulator.engine", "import vllm\nfrom sola_sched.scheduler import Scheduler"),
    ],
)
def test_rule_accepts_a_downward_import(module: str, source: str) -> None:
    assert violations(module, imported_names(source, module, is_package=False)) == []


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, sola_sched\n"
        "heavy = {'vllm', 'torch', 'triton', 'ray', 'faiss', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[]\n", "")
