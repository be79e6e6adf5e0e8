"""Python source that is read and not run: modules, classes, members and what type they have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

#: Annotations whose last argument is what they hold.
_HOLDERS = {
    "list", "set", "frozenset", "dict", "deque", "Iterable", "Iterator", "Sequence", "Mapping",
    "Collection", "OrderedDict", "defaultdict", "PlannedQueue", "WeakSet",
}  # fmt: skip


@dataclass(frozen=True)
class Many:
    """A container of `item`."""

    item: object


@dataclass(frozen=True)
class Several:
    """A tuple of types, None for those unknown."""

    items: tuple[object, ...]


@dataclass(frozen=True)
class TheClass:
    """A class itself, not an instance."""

    of: Class


class Class:
    """A class of some module."""

    def __init__(self, module: Module, node: ast.ClassDef) -> None:
        self.module, self.node, self.name = module, node, node.name

    def __repr__(self) -> str:
        return f"{self.module.name}.{self.name}"

    @cached_property
    def bases(self) -> list[Class]:
        found = [self.module.class_of(base) for base in self.node.bases]
        return [base for base in found if base is not None]

    @cached_property
    def mro(self) -> list[Class]:
        """The class and all its bases that are known, depth first."""
        return [self, *(cls for base in self.bases for cls in base.mro)]

    @cached_property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.node.body if isinstance(n, ast.FunctionDef)}

    @cached_property
    def declared(self) -> dict[str, ast.expr | None]:
        """Class variables and fields with their annotations."""
        found: dict[str, ast.expr | None] = {}
        for node in self.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node.annotation
            elif isinstance(node, ast.Assign):
                found.update({t.id: None for t in node.targets if isinstance(t, ast.Name)})
        return found

    @cached_property
    def bare(self) -> set[str]:
        """Names that are annotated and not given a value: somebody else's."""
        return {
            n.target.id
            for n in self.node.body
            if isinstance(n, ast.AnnAssign) and n.value is None and isinstance(n.target, ast.Name)
        }

    @cached_property
    def stored(self) -> dict[str, tuple[ast.FunctionDef, ast.expr | None, ast.expr | None]]:
        """Names assigned to `self`: the method, the annotation and the value."""
        found: dict[str, tuple[ast.FunctionDef, ast.expr | None, ast.expr | None]] = {}
        for method in self.methods.values():
            for node in ast.walk(method):
                targets: list[tuple[ast.expr, ast.expr | None, ast.expr | None]] = []
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Tuple):
                            values = getattr(node.value, "elts", [None] * len(target.elts))
                            targets += [
                                (t, None, v) for t, v in zip(target.elts, values, strict=False)
                            ]
                        else:
                            targets.append((target, None, node.value))
                elif isinstance(node, ast.AnnAssign):
                    targets.append((node.target, node.annotation, node.value))
                elif isinstance(node, ast.AugAssign):
                    targets.append((node.target, None, None))
                for target, annotation, value in targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        before = found.get(target.attr)
                        if before is None or (before[1] is None and annotation is not None):
                            found[target.attr] = (method, annotation, value)
        return found

    def defines(self, name: str) -> bool:
        """Whether the class itself, not a base, has a member of this name."""
        return name in self.methods or name in self.declared or name in self.stored

    def has(self, name: str) -> bool:
        return any(c.defines(name) for c in self.mro)

    @property
    def is_enum(self) -> bool:
        return any("Enum" in ast.dump(b) for c in self.mro for b in c.node.bases)

    def is_a(self, prefix: str) -> Class | None:
        """The first class of the order of bases whose module begins with `prefix`."""
        return next((c for c in self.mro if c.module.name.startswith(prefix)), None)


@dataclass
class Module:
    """A module's names."""

    name: str
    tree: ast.Module
    world: World
    is_package: bool = False
    classes: dict[str, Class] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, Class(self, node))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname or "." not in alias.name:
                        self.imports[alias.asname or alias.name] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    parts = self.name.split(".")
                    parent = parts[: len(parts) - node.level + self.is_package]
                    source = ".".join([*parent, *filter(None, [source])])
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(source)
                    else:
                        self.imports[alias.asname or alias.name] = (source, alias.name)
        for top in self.top_level(self.tree.body):
            if isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[top.name] = top
            elif isinstance(top, ast.AnnAssign) and isinstance(top.target, ast.Name) and top.value:
                self.aliases.setdefault(top.target.id, top.value)
            elif isinstance(top, ast.Assign) and isinstance(top.targets[0], ast.Name):
                self.aliases.setdefault(top.targets[0].id, top.value)

    def top_level(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Statements outside functions and classes, those under `if` and `try` too."""
        for node in body:
            yield node
            if isinstance(node, ast.If):
                yield from self.top_level([*node.body, *node.orelse])
            elif isinstance(node, ast.Try):
                handlers = [s for h in node.handlers for s in h.body]
                yield from self.top_level([*node.body, *handlers, *node.orelse])

    def has(self, name: str) -> bool:
        """Whether `from this import name` works, as far as the source tells."""
        if name in self.classes or name in self.functions or name in self.imports:
            return True
        if name in self.aliases or self.world.module(f"{self.name}.{name}") is not None:
            return True
        sources = map(self.world.module, self.stars)
        if any(source is not None and source.has(name) for source in sources):
            return True
        # Names that are loaded on first use are listed as strings.
        return "__getattr__" in self.functions and any(
            isinstance(n, ast.Constant) and n.value == name for n in ast.walk(self.tree)
        )

    def class_named(self, name: str, depth: int = 0) -> Class | None:
        """The class that `name` means in this module."""
        if name in self.classes:
            return self.classes[name]
        if depth > 8:
            return None
        if name in self.imports:
            source, original = self.imports[name]
            module = self.world.module(source)
            if module is not None and original is not None:
                return module.class_named(original, depth + 1)
        if name in self.aliases:
            return self.class_of(self.aliases[name], depth + 1)
        return None

    def function_named(
        self, name: str, depth: int = 0
    ) -> tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        """The function that `name` means in this module, and where it is."""
        if name in self.functions:
            return self, self.functions[name]
        source, original = self.imports.get(name, ("", None))
        module = self.world.module(source) if original and depth < 8 else None
        return module.function_named(original or "", depth + 1) if module else None

    def class_of(self, node: ast.expr | None, depth: int = 0) -> Class | None:
        """The class that an expression names."""
        if isinstance(node, ast.Name):
            return self.class_named(node.id, depth)
        if isinstance(node, ast.Subscript):
            return self.class_of(node.value, depth)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            source = self.imports.get(node.value.id)
            module = self.world.module(source[0]) if source else None
            return module.class_named(node.attr, depth) if module else None
        return None

    def type_of(self, node: ast.expr | None) -> object:
        """The type that an annotation means; None if it says nothing."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.type_of(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            return self.type_of(node.left) or self.type_of(node.right)
        if isinstance(node, ast.Subscript):
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            args = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name in ("Optional", "Annotated", "ClassVar", "Final", "SkipValidation"):
                return self.type_of(args[0])
            if name == "tuple":
                if len(args) == 2 and getattr(args[1], "value", None) is ...:
                    return Many(self.type_of(args[0]))
                return Several(tuple(self.type_of(arg) for arg in args))
            if name == "type":
                of = self.type_of(args[0])
                return TheClass(of) if isinstance(of, Class) else None
            if name in _HOLDERS:
                return Many(self.type_of(args[-1]))
            return self.class_of(node.value)
        return self.class_of(node)


class World:
    """All modules that `read` can find.

    Args:
        read: The text of a file by its path in a package, e.g. ``vllm/v1/request.py``; None if
            there is none.
    """

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = None
            path = name.replace(".", "/")
            text, is_package = self._read(f"{path}.py"), False
            if text is None:
                text, is_package = self._read(f"{path}/__init__.py"), True
            if text is not None:
                self._modules[name] = Module(name, ast.parse(text), self, is_package)
        return self._modules[name]

    def modules(self) -> list[Module]:
        """All modules read so far."""
        return [module for module in self._modules.values() if module is not None]

    def class_at(self, dotted: str) -> Class | None:
        """The class of a dotted name."""
        module, _, name = dotted.rpartition(".")
        found = self.module(module)
        return found.class_named(name) if found else None
