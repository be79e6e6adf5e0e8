"""Finds the source files that decide a result, from the imports written in them.

Static: the files are parsed, not imported, so that asking costs no import of vLLM. What runs under
``TYPE_CHECKING`` only is left out. Followed are the modules of `sola_sched`, those of the folders
of `benchmarks/`, and those that lie beside a script.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_PACKAGE = "sola_sched"
_BENCHMARKS = Path(__file__).resolve().parents[1]
_FULL_NAME = re.compile(rf"{_PACKAGE}(\.[a-zA-Z_]\w*)+")


def digest(files: Iterable[Path]) -> str:
    """Changes with the name or the content of any of the files; one that is missing counts too.

    The same wherever the files lie, so in whatever order they come.
    """
    contents = ((file.name, file.read_bytes() if file.is_file() else b"") for file in files)
    total = hashlib.sha256()
    for name, content in sorted(contents):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]


def import_closure(roots: Iterable[str | Path], without: Collection[str] = ()) -> tuple[Path, ...]:
    """The files of the roots and of all that they import, directly or through others; sorted.

    Imports inside functions count, and so does a module that a string names in full, such as
    ``"sola_sched.simulator.baselines.rules"`` or ``"sola_sched.vllm_adapter.scheduler.Scheduler"``.

    Args:
        roots: Names of modules in `sola_sched` or `benchmarks/`, and script files.
        without: Names of modules that are known not to be used; nothing is followed through them.

    Raises:
        ValueError: A root, or what is left out, is no module.
    """
    found: set[Path] = set()
    left: list[Path] = []

    def add(files: Iterable[Path]) -> None:
        for file in files:
            if file not in found:
                found.add(file)
                left.append(file)

    excluded = {_file_of(name) for name in without}
    for root in roots:
        add((root.resolve(),) if isinstance(root, Path) else (_file_of(root), *_files_of(root)))
    while left:
        file = left.pop()
        names, folder = _imports(file), file.parent
        add(other for name in names for other in _files_of(name, folder) if other not in excluded)
    return tuple(sorted(found))


def _file_of(name: str) -> Path:
    files = _files_of(name)
    last = files[-1] if files else Path()
    if (last.parent.name if last.name == "__init__.py" else last.stem) != name.rpartition(".")[2]:
        raise ValueError(f"There must be a module {name!r} in {_PACKAGE} or {_BENCHMARKS.name}/.")
    return last


@functools.lru_cache(maxsize=4096)
def _files_of(name: str, folder: Path | None = None) -> tuple[Path, ...]:
    """The file of a module, after the ``__init__`` files that run before it; () if not followed.

    ``a.b.name`` stands for ``a.b`` where `name` is something in it, and for the module that a lazy
    package takes `name` from.
    """
    head, *rest = name.split(".")
    if head != _PACKAGE:
        beside = folder / f"{head}.py" if folder is not None else None
        if beside is not None and beside.is_file() and _is_script_folder(beside.parent):
            return (beside,)
        return _files_below(_BENCHMARKS, name)
    files: list[Path] = []
    module, is_package = "", True
    for part in (head, *rest):
        if not is_package:
            break
        full = f"{module}.{part}" if module else part
        spec = importlib.util.find_spec(full)
        if spec is None or spec.origin is None:
            target = _lazy_names(files[-1]).get(part) if files else None
            return (*files, *_files_of(target)) if target else tuple(files)
        files.append(Path(spec.origin).resolve())
        module, is_package = full, spec.submodule_search_locations is not None
    return tuple(files)


def _files_below(folder: Path, name: str) -> tuple[Path, ...]:
    """As `_files_of` for packages that lie in a folder and may have no ``__init__``."""
    files: list[Path] = []
    for part in name.split("."):
        if (folder / f"{part}.py").is_file():
            return (*files, folder / f"{part}.py")
        folder = folder / part
        if (folder / "__init__.py").is_file():
            files.append(folder / "__init__.py")
    return tuple(files)


def _is_script_folder(folder: Path) -> bool:
    """A script's folder is no package; beside a module of a package lies nothing that it names."""
    return not (folder / "__init__.py").exists()


@functools.lru_cache(maxsize=1024)
def _imports(file: Path) -> frozenset[str]:
    """Full names that a file imports or names."""
    names: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    for node in _run_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            raise ValueError(f"Imports must be absolute (line {node.lineno} of {file}).")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.replace(":", ".")
            if _FULL_NAME.fullmatch(text):
                names.add(text)
    if file.name == "__init__.py":  # the names that a lazy package knows are not loaded with it
        names -= set(_lazy_names(file).values())
    return frozenset(names)


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from (other, *_run_nodes(other))
            continue
        yield child
        yield from _run_nodes(child)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


@functools.lru_cache(maxsize=64)
def _lazy_names(init: Path) -> dict[str, str]:
    """Name to module of what a package loads on first use, as it tells type checkers."""
    tree = ast.parse(init.read_text(encoding="utf-8"), str(init))
    return {
        alias.asname or alias.name: node.module
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and _is_type_checking(branch.test)
        for node in ast.walk(branch)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
