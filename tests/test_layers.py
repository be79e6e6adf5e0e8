"""Import rules: each package says in its docstring what it may import, and nothing imports upward.

The rules read the source with ``ast``, so an import inside a function or under ``TYPE_CHECKING``
counts like one at the top.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Packages at the top of the repository that are installed inside `sola_sched`.
LEAVES = ("kernels", "kv_swap", "length_predictor")
#: Loads its names on first use, so it may point at any package; heavy ones stay out.
FACADE = "sola_sched"
#: A line of a package's docstring, up to the full stop.
_RULE = r"^{}: ([^.]*(?:\.\*[^.]*)*)\.$"


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


@dataclass(frozen=True)
class Rules:
    """What a package may import.

    Attributes:
        own: Packages of `sola_sched`, by their first name.
        doors: Other packages than Python's own, each with the modules that may import it.
    """

    own: frozenset[str]
    doors: dict[str, tuple[str, ...]]


def parse_rules(docstring: str) -> Rules:
    """Read ``May import: a, b.`` and ``Third party: numpy, vllm (module, folder.*).``."""
    found = [
        re.search(_RULE.format(name), docstring, re.M) for name in ("May import", "Third party")
    ]
    own, third_party = ("" if match is None else match[1] for match in found)
    if not own or not third_party:
        raise ValueError(f"A package's docstring must say what it may import (got {docstring!r}).")
    doors = {}
    for name, modules in re.findall(r"(\w+)(?:\s+\(([^)]*)\))?", third_party):
        doors[name] = tuple(x.strip() for x in modules.split(",")) if modules else ("*",)
    return Rules(
        frozenset(re.findall(r"\w+", own)) - {"none"},
        {k: v for k, v in doors.items() if k != "none"},
    )


@functools.cache
def rules_of(package: str) -> Rules:
    folder = ROOT / package if package in LEAVES else ROOT / "sola_sched" / package
    source = (folder / "__init__.py").read_text(encoding="utf-8")
    return parse_rules(ast.get_docstring(ast.parse(source)) or "")


def violations(module: str, names: set[str]) -> list[str]:
    """Return what the module imports against the rules, each as ``name: rule``."""
    package, _, within = module.partition(".")[2].partition(".")
    if module in {FACADE, "sola_sched.errors"}:
        own, doors = (None if module == FACADE else frozenset[str]()), {}
    else:
        own, doors = rules_of(package).own | {package}, rules_of(package).doors
    found = []
    for name in sorted(names):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "sola_sched":
            is_open = own is None or not target or target == "__version__" or target in own
            if not is_open:
                found.append(f"{name}: {package or module} may import {sorted(own or ())} only")
        elif top in sys.stdlib_module_names:
            continue
        elif not any(fnmatch(within or "__init__", door) for door in doors.get(top, ())):
            found.append(f"{name}: {package or module} may import {doors} only")
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
        ("sola_sched.config.slo", "import vllm"),
        ("sola_sched.config.slo", "import torch"),
        ("sola_sched.config.slo", "import pandas"),
        ("sola_sched.config.slo", "def f():\n    from vllm.v1 import request"),
        ("sola_sched.config.slo", "importlib.import_module('faiss')"),
        ("sola_sched.config.slo", "from sola_sched import Scheduler"),
        ("sola_sched.config.slo", "from .. import planner"),
        ("sola_sched.errors", "import numpy"),
        ("sola_sched.errors", "import sola_sched.config.slo"),
        ("sola_sched.planner.attain", "from ..vllm_adapter.scheduler import Scheduler"),
        ("sola_sched.planner.attain", "from sola_sched.kernels import reference"),
        ("sola_sched.planner.attain", "import sola_sched.bench.run"),
        ("sola_sched", "if TYPE_CHECKING:\n    import vllm"),
        ("sola_sched.kernels.reference", "import sola_sched.kv_swap"),
        ("sola_sched.kernels.reference", "import sola_sched.vllm_adapter.scheduler"),
        ("sola_sched.kv_swap.host_pool", "import triton"),
        ("sola_sched.kv_swap.host_pool", "import vllm"),
        ("sola_sched.length_predictor.lexical.features", "import faiss"),
        ("sola_sched.vllm_adapter.scheduler", "import ray"),
        ("sola_sched.vllm_adapter.scheduler", "import sola_sched.simulator.engine"),
        ("sola_sched.bench.report.table", "import vllm"),
    ],
)
def test_rule_rejects_an_upward_or_heavy_import(module: str, source: str) -> None:
    assert violations(module, imported_names(source, module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sola_sched.planner.attain", "import numpy, scipy.optimize, heapq"),
        ("sola_sched.planner.attain", "from ..core.state import StepState"),
        ("sola_sched.kernels.int8_kv", "import torch, triton"),
        ("sola_sched.kv_swap.transfer", "from sola_sched.kernels import int8_kv"),
        ("sola_sched.kv_swap.connector", "import vllm"),
        ("sola_sched.length_predictor.retrieval.index", "import faiss"),
        ("sola_sched.vllm_adapter.scheduler", "import vllm\nimport sola_sched.planner"),
        ("sola_sched.bench.backends.engine", "import vllm"),
        (
            "sola_sched.simulator.engine",
            "import vllm\nfrom sola_sched.vllm_adapter.scheduler import Scheduler",
        ),
    ],
)
def test_rule_accepts_a_downward_import(module: str, source: str) -> None:
    assert violations(module, imported_names(source, module, is_package=False)) == []


def test_the_rules_allow_no_circle() -> None:
    packages = {module.split(".")[1] for module, _, _ in SOURCES if module.count(".") > 1}
    order = graphlib.TopologicalSorter({name: rules_of(name).own for name in packages})

    assert set(order.static_order()) == packages | {"errors"}


def test_the_structure_page_lists_each_package_above_what_it_may_import() -> None:
    drawing = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").split("```")[1]
    listed = re.findall(r"^ {3}(\w+)", drawing, flags=re.M)
    packages = {module.split(".")[1] for module, _, _ in SOURCES if module.count(".") > 1}

    assert sorted(listed) == sorted(packages | {"errors"})
    for position, name in enumerate(listed):
        if name != "errors":
            assert rules_of(name).own <= set(listed[position + 1 :]), name


@pytest.mark.parametrize(
    "docstring", ["Nothing of the kind.", "May import: errors.", "Third party: numpy."]
)
def test_a_package_without_rules_is_an_error(docstring: str) -> None:
    with pytest.raises(ValueError, match="must say what it may import"):
        parse_rules(docstring)


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, sola_sched\n"
        "heavy = {'vllm', 'torch', 'triton', 'ray', 'faiss', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[]\n", "")


#: A full name of ours in a docstring, a comment or a page; the last is the group of entry points.
NAMED = re.compile(r"`(sola_sched(?:\.\w+)+)`")
NO_MODULES = {"sola_sched.policies"}


def is_there(name: str, files: dict[str, Path]) -> bool:
    """Whether it is a module, or something that a module has."""
    module, _, last = name.rpartition(".")
    if name in files:
        return True
    return module in files and re.search(rf"\b{last}\b", files[module].read_text()) is not None


@pytest.mark.parametrize(
    "path",
    [
        *(path for _, _, path in source_files()),
        *sorted(ROOT.glob("docs/**/*.md")),
        ROOT / "README.md",
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_modules_that_a_text_names_are_there(path: Path) -> None:
    files = {name: path for name, _, path in source_files()}
    named = set(NAMED.findall(path.read_text())) - NO_MODULES
    assert not [name for name in sorted(named) if not is_there(name, files)]


def test_a_module_that_is_gone_is_found() -> None:
    files = {name: path for name, _, path in source_files()}
    assert is_there("sola_sched.cost.model.CostModel", files)
    assert not is_there("sola_sched.cost_model.CostModel", files)
