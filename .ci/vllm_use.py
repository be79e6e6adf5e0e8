"""Finds, by reading our source and vLLM's, every name of vLLM that the project touches.

`vllm_types` follows types through our source. `uses` gives attributes and methods with the class of
vLLM that has to have them, `imports` what is imported from vLLM, and `lacks` what a given vLLM has
not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from sources import Class, Module, World
from vllm_known import BY_NAME
from vllm_types import Reader, Scope, Use, host_of, own_nodes

from sola_sched.vllm_adapter.names import SCHEDULER

ROOT = Path(__file__).resolve().parents[1]
_LEAVES = ("kernels", "kv_swap", "length_predictor")
#: Modules that only engines with KV swapping need, and the class that hands hooks over to them.
SWAPPING = (
    "sola_sched.kv_swap",
    "sola_sched.vllm_adapter.swap.swapping",
    "sola_sched.simulator.swap_link",
)
_SCHEDULER = "sola_sched.vllm_adapter.scheduler"


def _functions(
    node: ast.AST, cls: ast.ClassDef | None = None
) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield cls, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, child)
        else:
            yield from _functions(child, cls)


def _walk(
    reader: Reader,
    module: Module,
    cls: Class | None,
    function: ast.FunctionDef,
    outer: dict[str, object] | None = None,
) -> None:
    scope = Scope(reader, module, cls, function, outer)
    _note(scope, function)
    for _, inner in _functions(function):
        _walk(reader, module, cls, inner, scope.env)


def _note(scope: Scope, owner: ast.AST) -> None:
    """Record what the statements of a function, class or module touch."""
    scope.note = True
    for node in own_nodes(owner):
        if isinstance(node, (ast.Attribute, ast.Call)):
            scope.type_of(node)


def _named(reader: Reader, module: Module) -> None:
    """Names of the scheduler's members that are written as strings, as for `setattr`."""
    host = reader.world.class_at(BY_NAME["scheduler"])
    assert host is not None
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and host.has(node.value):
            where = f"{module.name}:{node.lineno}"
            reader.found.add(Use(repr(host), node.value, True, where))


def _overrides(reader: Reader, cls: Class) -> None:
    """Methods of ours that vLLM calls by a name of its own."""
    host = host_of(cls)
    for name, method in cls.methods.items():
        if host is not None and host.has(name) and not name.startswith("__"):
            where = f"{cls.module.name}:{method.lineno}"
            reader.found.add(Use(repr(host), name, False, where))


# The project, and a vLLM ---------------------------------------------------------------------


def our_path(path: str) -> Path:
    """Where a file of the installed package lies in the repository."""
    parts = path.split("/")
    if len(parts) > 1 and parts[0] == "sola_sched" and parts[1].removesuffix(".py") in _LEAVES:
        return ROOT.joinpath(*parts[1:])
    return ROOT / path


def installed(folder: Path) -> Callable[[str], str | None]:
    """Reads files of a vLLM that lies in `folder`, e.g. ``site-packages``."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def make_world(read_vllm: Callable[[str], str | None]) -> World:
    """Our source beside a vLLM."""

    def read(path: str) -> str | None:
        if path.startswith("vllm/"):
            return read_vllm(path)
        if path.startswith("sola_sched/"):
            file = our_path(path)
            return file.read_text(encoding="utf-8") if file.is_file() else None
        return None

    return World(read)


@cache
def our_modules() -> list[str]:
    """Names of our modules that touch vLLM: by an import, or by taking its objects."""
    found = []
    for folder, prefix in [
        ("sola_sched", "sola_sched"),
        *((x, f"sola_sched.{x}") for x in _LEAVES),
    ]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if (
                "import vllm" in text
                or "from vllm" in text
                or "vllm_config" in text
                or (parts[-1] == "vllm_compat")
            ):
                found.append(".".join((prefix, *(p for p in parts if p != "__init__"))))
    return found


def uses(world: World) -> tuple[set[Use], set[tuple[str, str]]]:
    """Attributes of vLLM's classes that our modules touch, and those of unknown receivers."""
    reader = Reader(world)
    modules = [world.module(name) for name in our_modules()]
    for module in modules:
        assert module is not None
        for node, function in _functions(module.tree):
            cls = module.classes.get(node.name) if node is not None else None
            _walk(reader, module, cls, function)
        _note(Scope(reader, module, None, None), module.tree)
        for cls in module.classes.values():
            _note(Scope(reader, module, None, None), cls.node)
            _overrides(reader, cls)
        if module.name == "sola_sched.vllm_adapter.versions":
            _named(reader, module)
    return reader.found, reader.unknown


def is_of_swapping(use: Use) -> bool:
    """Whether only engines with KV swapping need it: the scheduler has some of their hooks."""
    is_hook = use.module == _SCHEDULER and use.name in SCHEDULER.swapping
    return is_hook or use.where.startswith(SWAPPING)


def unclear(found: set[Use], unknown: set[tuple[str, str]], world: World) -> list[str]:
    """Attributes of receivers whose type is not known that vLLM's classes in use have."""
    owners = [world.class_at(use.owner) for use in found]
    common = {name for kind in (str, list, dict, set, type) for name in dir(kind)}
    members = {
        name
        for owner in owners
        if owner is not None
        for cls in owner.mro
        for name in (*cls.methods, *cls.declared, *cls.stored)
    }
    return sorted(f"{where} .{name}" for where, name in unknown if name in members - common)


def lacks(found: Iterable[Use], world: World) -> list[Use]:
    """Those of `found` that the vLLM in `world` does not have."""
    missing = []
    for use in sorted(found):
        module, cls = world.module(use.owner), world.class_at(use.owner)
        owner = module if module is not None else cls
        if not use.is_optional and (owner is None or not owner.has(use.name)):
            missing.append(use)
    return missing


def lacking_choices(world: World) -> list[str]:
    """Names that our modules look for in several modules of vLLM, and that are in none of them.

    These are imports of one name within one `try` and its handlers.
    """
    missing = []
    for name in our_modules():
        module = world.module(name)
        assert module is not None
        for choice in _outermost_tries(module.tree):
            places: dict[str, list[str]] = {}
            for node in _imports_from_vllm(choice):
                for alias in node.names:
                    places.setdefault(alias.name, []).append(node.module or "")
            for wanted, owners in places.items():
                there = [world.module(owner) for owner in owners]
                if len(owners) > 1 and not any(o is not None and o.has(wanted) for o in there):
                    names = ", ".join(f"{owner}.{wanted}" for owner in owners)
                    missing.append(f"{names} ({name}:{choice.lineno})")
    return missing


def _outermost_tries(node: ast.AST) -> Iterator[ast.Try]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try):
            yield child
        else:
            yield from _outermost_tries(child)


def _imports_from_vllm(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield node


def imports(world: World) -> set[Use]:
    """Names that our modules import from vLLM."""
    found = set()
    for name in our_modules():
        module = world.module(name)
        assert module is not None
        guarded = {
            id(inner) for choice in _outermost_tries(module.tree) for inner in ast.walk(choice)
        }
        for node in _imports_from_vllm(module.tree):
            where = f"{name}:{node.lineno}"
            for alias in node.names:
                found.add(Use(node.module or "", alias.name, id(node) in guarded, where))
    return found
