"""Types of vLLM in our source, and the names of vLLM that it touches.

Types flow from annotations, constructor calls and vLLM's own annotations; parameters that are `Any`
go by their names (`vllm_known.BY_NAME`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from sources import Class, Many, Module, Several, TheClass, World
from vllm_known import ATTRIBUTES, BY_NAME, BY_NAME_IN, OURS

_ITEM_OF = {"get", "setdefault", "pop", "popleft", "peek_request", "pop_request"}
_SAME = {"list", "sorted", "set", "tuple", "reversed", "iter", "deque", "filter", "frozenset"}
#: Nodes that give a name a type.
_BINDING = (
    ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.Assert, ast.withitem,
)  # fmt: skip
#: A type that is known and not vLLM's.
OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """One name that has to be there.

    Attributes:
        owner: Dotted name of vLLM's class.
        is_optional: Asked for with a default or `hasattr`, or in a `try` for an older version.
        where: Our module and line.
    """

    owner: str
    name: str
    is_optional: bool
    where: str

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name} ({self.where})"


class Reader:
    """Infers types; records uses where `note` is set."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: set[Use] = set()
        self.unknown: set[tuple[str, str]] = set()
        self._members: dict[tuple[str, str], object] = {}
        self._families: dict[Class, list[Class]] = {}
        self._scopes: dict[ast.FunctionDef, Scope] = {}

    # Types --------------------------------------------------------------------------------------

    def member(self, owner: Class, name: str) -> object:
        """The type of an attribute, or of what a property returns."""
        key = (repr(owner), name)
        if key not in self._members:
            self._members[key] = None
            self._members[key] = self._find_member(owner, name)
        return self._members[key]

    def _find_member(self, owner: Class, name: str) -> object:
        given = ATTRIBUTES.get((owner.name, name))
        if given:
            found = self.world.class_at(given.removeprefix("many "))
            return Many(found) if given.startswith("many ") else found
        for cls in self.family(owner):
            if name in cls.methods:
                method = cls.methods[name]
                is_property = any("property" in ast.dump(d) for d in method.decorator_list)
                return cls.module.type_of(method.returns) if is_property else None
            if name in cls.declared:
                found = cls.module.type_of(cls.declared[name])
                if found is not None:
                    return found
            if name in cls.stored:
                method, annotation, value = cls.stored[name]
                found = cls.module.type_of(annotation)
                if found is None and value is not None:
                    found = self._scope(cls, method).type_of(value)
                if found not in (None, Many(None)):
                    return found
        return None

    def _scope(self, cls: Class, method: ast.FunctionDef) -> Scope:
        if method not in self._scopes:
            self._scopes[method] = Scope(self, cls.module, cls, method)
        return self._scopes[method]

    def family(self, cls: Class) -> list[Class]:
        """A class with its bases, and one of ours with the classes that it is mixed into."""
        if not cls.module.name.startswith("sola_sched"):
            return cls.mro
        if cls not in self._families:
            modules = [m for m in self.world.modules() if m.name.startswith("sola_sched")]
            mixed = [c for m in modules for c in m.classes.values() if cls in c.mro]
            self._families[cls] = [*cls.mro, *(c for other in mixed for c in other.mro)]
        return self._families[cls]

    def returned(self, owner: Class, name: str) -> object:
        """What a method returns."""
        for cls in owner.mro:
            if name in cls.methods:
                found = cls.module.type_of(cls.methods[name].returns)
                return owner if getattr(cls.methods[name].returns, "id", "") == "Self" else found
        return None


class Scope:
    """One function, with the types of its names."""

    def __init__(
        self,
        reader: Reader,
        module: Module,
        cls: Class | None,
        function: ast.FunctionDef | None,
        outer: dict[str, object] | None = None,
    ) -> None:
        self.reader, self.module, self.cls = reader, module, cls
        self.note = False
        self.env: dict[str, object] = dict(outer or {})
        self.optional: set[int] = set()
        if function is None:
            return
        if cls is not None and function.args.args and function.args.args[0].arg == "self":
            self.env["self"] = cls
        elif cls is not None and function.args.args and function.args.args[0].arg == "cls":
            self.env["cls"] = TheClass(cls)
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation is not None and argument.arg not in ("self", "cls"):
                found = module.type_of(argument.annotation)
                is_any = getattr(argument.annotation, "id", "") == "Any"
                self.env[argument.arg] = None if is_any else (found or OTHER)
        for extra in (function.args.vararg, function.args.kwarg):
            if extra is not None:
                self.env[extra.arg] = OTHER
        binding = [node for node in own_nodes(function) if isinstance(node, _BINDING)]
        for _ in range(2):
            for node in binding:
                self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._set(target, self.type_of(node.value))
        elif isinstance(node, ast.AnnAssign):
            is_any = getattr(node.annotation, "id", "") == "Any"
            found = self.module.type_of(node.annotation)
            self._set(node.target, found or (None if is_any else OTHER))
        elif isinstance(node, ast.NamedExpr):
            self._set(node.target, self.type_of(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._set(node.target, self._item(self.type_of(node.iter)))
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Call):
            if getattr(node.test.func, "id", "") == "isinstance":
                found = self.type_of(node.test.args[1])
                self._set(node.test.args[0], found.of if isinstance(found, TheClass) else None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._set(node.optional_vars, self.type_of(node.context_expr))

    def _set(self, target: ast.expr, found: object) -> None:
        if isinstance(target, ast.Name):
            if found is not None or target.id not in self.env:
                self.env[target.id] = found
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = found.items if isinstance(found, Several) else ()
            for index, element in enumerate(target.elts):
                if isinstance(found, Several):
                    self._set(element, items[index] if index < len(items) else None)
                else:
                    self._set(element, OTHER if found == OTHER else None)

    @staticmethod
    def _item(found: object) -> object:
        if isinstance(found, Many):
            return found.item
        if isinstance(found, Several):
            return next((item for item in found.items if item is not None), None)
        return OTHER if found == OTHER else None

    def by_name(self, name: str) -> object:
        given = BY_NAME_IN.get(self.module.name, {}).get(name, BY_NAME.get(name, ""))
        if given is None:
            return OTHER
        return self.reader.world.class_at(given) if given else None

    def type_of(self, node: ast.expr | None) -> object:
        """The type of an expression; attributes of vLLM in it are recorded if `note` is set."""
        match node:
            case ast.Name(id=name):
                found = self.env.get(name)
                if found is not None:
                    return found
                if name in self.env or name not in self.module.imports:
                    found = self.by_name(name)
                    if found is not None:
                        return found
                named = self.module.class_named(name)
                if named is not None:
                    return TheClass(named)
                return OTHER if name in self.module.imports else None
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=index):
                found = self.type_of(value)
                if isinstance(found, Many):
                    return found if isinstance(index, ast.Slice) else found.item
                if isinstance(found, Several) and isinstance(index, ast.Constant):
                    return found.items[index.value] if index.value < len(found.items) else None
                return OTHER if found == OTHER else None
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(body) or self.type_of(orelse)
            case ast.BoolOp(values=values):
                known = [self.type_of(value) for value in values]
                return next((k for k in known if k not in (None, OTHER)), known[0])
            case ast.NamedExpr(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.type_of(value)
            case ast.ListComp(elt=elt) | ast.GeneratorExp(elt=elt) | ast.SetComp(elt=elt):
                return Many(self.type_of(elt))
            case ast.DictComp(value=value):
                return Many(self.type_of(value))
            case ast.Tuple(elts=elts) if not any(isinstance(e, ast.Starred) for e in elts):
                return Several(tuple(self.type_of(elt) for elt in elts))
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                for elt in elts:
                    found = self.type_of(elt)
                    if isinstance(elt, ast.Starred):
                        found = self._item(found)
                    if found not in (None, OTHER):
                        return Many(found)
                return Many(None)
            case ast.Constant() | ast.JoinedStr() | ast.Compare() | ast.BinOp() | ast.UnaryOp():
                return OTHER
        return None

    def _attribute(self, node: ast.Attribute) -> object:
        if _is_super(node.value):
            return self._host_use(node)
        receiver = self.type_of(node.value)
        if isinstance(receiver, TheClass):
            self._touch(receiver.of, node.attr, node)
            return receiver.of if receiver.of.is_enum else None
        if isinstance(receiver, Class):
            self._touch(receiver, node.attr, node)
            return self.reader.member(receiver, node.attr)
        if receiver is None and self.note:
            self.reader.unknown.add((f"{self.module.name}:{node.lineno}", node.attr))
        return OTHER if receiver == OTHER else None

    def _host_use(self, node: ast.Attribute) -> object:
        host = host_of(self.cls)
        if host is not None:
            self._record(host, node.attr, node)
        return None

    def _call(self, node: ast.Call) -> object:
        function = node.func
        first = node.args[0] if node.args else None
        if isinstance(function, ast.Name):
            name = function.id
            if name in ("getattr", "hasattr", "setattr") and len(node.args) >= 2:
                return self._asked(node, name)
            if name in _SAME or name in ("next", "min", "max"):
                found = self.type_of(node.args[-1] if name == "filter" else first)
                if name in ("next", "min", "max"):
                    return self._item(found)
                return found if isinstance(found, Many) else None
            if name == "zip":
                kinds = [self._item(self.type_of(argument)) for argument in node.args]
                return Many(Several(tuple(kinds)))
            if name == "enumerate":
                return Many(Several((OTHER, self._item(self.type_of(first)))))
            if name == "map" and len(node.args) == 2:
                return self._mapped(node)
            if name == "replace":
                return self.type_of(first)
            found = self.type_of(function)
            if isinstance(found, TheClass):
                return found.of
            called = self.module.function_named(name)
            if called is not None:
                module, definition = called
                is_any = getattr(definition.returns, "id", "") == "Any"
                return module.type_of(definition.returns) or (None if is_any else OTHER)
            return OTHER if found == OTHER else None
        if isinstance(function, ast.Attribute):
            if _is_super(function.value):
                self._host_use(function)
                host = host_of(self.cls)
                return self.reader.returned(host, function.attr) if host else None
            receiver = self.type_of(function.value)
            if isinstance(receiver, Many):
                if function.attr in _ITEM_OF:
                    return receiver.item
                if function.attr == "items":
                    return Many(Several((None, receiver.item)))
                return receiver
            self._attribute(function)
            if isinstance(receiver, TheClass):
                return self.reader.returned(receiver.of, function.attr) or receiver.of
            if isinstance(receiver, Class):
                return self.reader.returned(receiver, function.attr)
            return OTHER if receiver == OTHER else None
        return None

    def _mapped(self, node: ast.Call) -> object:
        """`map(attrgetter(...), things)` touches an attribute of each."""
        item = self._item(self.type_of(node.args[1]))
        getter = node.args[0]
        alias = self.module.aliases.get(getter.id) if isinstance(getter, ast.Name) else None
        if isinstance(alias, ast.Call) and "attrgetter" in ast.dump(alias.func):
            for name in alias.args:
                if isinstance(item, Class) and isinstance(name, ast.Constant):
                    self._touch(item, str(name.value), node)
        return Many(None)

    def _asked(self, node: ast.Call, how: str) -> object:
        """`hasattr` and `getattr`; with a default the name is optional."""
        receiver, name = self.type_of(node.args[0]), node.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(receiver, Class):
            return None
        is_optional = how == "hasattr" or (how == "getattr" and len(node.args) == 3)
        if is_optional:
            self.optional.add(id(node))
        self._touch(receiver, name.value, node)
        return self.reader.member(receiver, name.value)

    def _touch(self, owner: Class, name: str, node: ast.expr) -> None:
        """Record an attribute if it has to come from vLLM."""
        if not self.note:
            return
        host = owner.is_a("vllm")
        if host is None or not owner.module.name.startswith("sola_sched"):
            if host is not None:
                self._record(host, name, node)
            return
        family = self.reader.family(owner)
        ours = [cls for cls in family if cls.module.name.startswith("sola_sched")]
        # Annotated without a value it is vLLM's; a private name is of a mix-in beside.
        is_bare = any(name in cls.bare for cls in ours) and not name.startswith(("_", "sola_"))
        if host.has(name) or is_bare or not any(cls.defines(name) for cls in ours):
            self._record(host, name, node)

    def _record(self, host: Class, name: str, node: ast.expr) -> None:
        is_ours = name.startswith(("__", "sola_")) or (host.name, name) in OURS
        if self.note and not is_ours and not (host.is_enum and name in ("name", "value")):
            where = f"{self.module.name}:{node.lineno}"
            self.reader.found.add(Use(repr(host), name, id(node) in self.optional, where))


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


def host_of(cls: Class | None) -> Class | None:
    """vLLM's class below one of ours."""
    return cls.is_a("vllm") if cls is not None else None


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, outer ones first, without those of functions in it."""
    found = [function]
    for node in found:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.append(child)
    yield from found[1:]
