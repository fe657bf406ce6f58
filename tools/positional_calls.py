"""Find calls of the project's own classes and functions with more arguments by position than a reader can tell apart.

A reader of such a call sees values without their names, and mypy finds two that were swapped only where their types
differ. The definition is found as Python finds it, by scopes and imports; a constructor's parameters are those of
``__init__``, or the fields of a dataclass or NamedTuple. Left alone are calls of values (a method of an object, a
parameter, a fixture), calls with a star, parameters that have no name for callers, and what a decorator compiles.

What is still wrong here: a name that is bound twice is not followed, and the order in which several bases are asked is
simpler than Python's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

MOST = 4
PRODUCT = ("protocol", "syncer", "worker", "operator", "cli")
BESIDE = ("bench", "tests", "tools")  # their files find those beside and above them, too
# Decorators whose functions are called with the parameters that stand below them.
KEEP_PARAMETERS = frozenset(
    {"staticmethod", "classmethod", "abstractmethod", "override", "cache", "lru_cache", "contextmanager"}
    | {"asynccontextmanager", "command", "no_grad"}
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Imported:
    """``name`` of a module, or the module itself where it is None."""

    module: str
    name: str | None


Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Names = dict[str, Function | ast.ClassDef | Imported | None]  # None: a value, which is not followed


@dataclass(frozen=True)
class Source:
    """One file, its path below the root."""

    path: Path
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Definition:
    """A class or function: where it stands, and the scopes around it, the module's first. ``skipped``: how many of its
    parameters the caller does not give (self)."""

    source: Source
    node: Function | ast.ClassDef
    scopes: tuple[Scope, ...]
    skipped: int = 0


@dataclass(frozen=True)
class Found:
    """A call; ``names``: those of its arguments from the fifth on."""

    source: Source
    call: ast.Call
    names: list[str]


class Sources:
    """All files of the project, and what their names mean."""

    def __init__(self, root: Path) -> None:
        self._files: dict[Path, Source] = {}
        self._names: dict[Scope, Names] = {}
        for folder in (*PRODUCT, *BESIDE):
            for path in sorted((root / folder).rglob("*.py")):
                if "_pb2" not in path.name:
                    text = path.read_text(encoding="utf-8")
                    short = path.relative_to(root)
                    self._files[short] = Source(short, text, ast.parse(text))

    def find_calls(self) -> Iterator[Found]:
        """Every call with too many arguments by position."""
        for source in self._files.values():
            if any(has_many(node) for node in ast.walk(source.tree)):
                yield from self._visit(source.tree, source, (source.tree,), None)

    def _visit(
        self, node: ast.AST, source: Source, scopes: tuple[Scope, ...], owner: Definition | None
    ) -> Iterator[Found]:
        """``owner``: the class whose body or method this is."""
        if has_many(node) and (names := self._late_names(node, source, scopes, owner)):
            yield Found(source, node, names)
        if isinstance(node, ast.ClassDef):
            owner = Definition(source, node, scopes)
        inner = scopes
        if isinstance(node, Function | ast.Lambda):
            inner = (*scopes, node)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child, source, inner if name == "body" else scopes, owner)

    def _late_names(
        self, call: ast.Call, source: Source, scopes: tuple[Scope, ...], owner: Definition | None
    ) -> list[str]:
        callee = self._resolve(call.func, source, scopes, owner)
        names = self._parameters(callee) if isinstance(callee, Definition) else None
        if names is None or len(call.args) > len(names):  # a star takes the rest
            return []
        late = names[MOST : len(call.args)]
        return [name for name in late if name is not None]

    # ---------------------------------------------------------------- names

    def _module(self, dotted: str, near: Path) -> Source | None:
        """The file of a module, as one of the files beside ``near`` imports it."""
        folders = [Path(folder) for folder in (*PRODUCT, *BESIDE)]
        if near.parts[0] in BESIDE:
            folders = [*near.parents, *folders]
        for folder in folders:
            path = folder.joinpath(*dotted.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file in self._files:
                    return self._files[file]
        return None

    def _bound(self, name: str, source: Source, scopes: tuple[Scope, ...]) -> Source | Definition | None:
        for count in range(len(scopes), 0, -1):
            scope = scopes[count - 1]
            if scope not in self._names:
                self._names[scope] = bindings(scope, source.path)
            if name in self._names[scope]:
                value = self._names[scope][name]
                if isinstance(value, Imported):
                    return self._imported(value, source.path)
                return None if value is None else Definition(source, value, scopes[:count])
        return None

    def _imported(self, one: Imported, near: Path) -> Source | Definition | None:
        if one.name is None:
            return self._module(one.module, near)
        if (inside := self._module(f"{one.module}.{one.name}", near)) is not None:
            return inside
        module = self._module(one.module, near)
        return None if module is None else self._bound(one.name, module, (module.tree,))

    def _resolve(
        self, node: ast.expr, source: Source, scopes: tuple[Scope, ...], owner: Definition | None
    ) -> Source | Definition | None:
        """The module, class or function that an expression names."""
        if isinstance(node, ast.Name):
            if node.id == "cls" and owner is not None:
                return owner
            return self._bound(node.id, source, scopes)
        if not isinstance(node, ast.Attribute):
            return None
        base = node.value
        if owner is not None and isinstance(base, ast.Name) and base.id in ("self", "cls"):
            return self._method(owner, node.attr, of_class=False)
        if owner is not None and isinstance(base, ast.Call) and ast.unparse(base) == "super()":
            bases = (self._method(one, node.attr, of_class=False) for one in self._bases(owner))
            return next((one for one in bases if one is not None), None)
        found = self._resolve(base, source, scopes, owner)
        if isinstance(found, Source):
            return self._bound(node.attr, found, (found.tree,))
        if found is not None and isinstance(found.node, ast.ClassDef):
            return self._method(found, node.attr, of_class=True)
        return None

    def _bases(self, one: Definition) -> Iterator[Definition]:
        assert isinstance(one.node, ast.ClassDef)
        for base in one.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self._resolve(name, one.source, one.scopes, None)
            if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef) and found.node is not one.node:
                yield found

    def _method(self, one: Definition, name: str, of_class: bool) -> Definition | None:
        """``of_class``: it is asked of the class, so that a plain method's self is given by the caller."""
        assert isinstance(one.node, ast.ClassDef)
        for node in one.node.body:
            if isinstance(node, Function) and node.name == name:
                marks = set(decorators(node))
                whole = "staticmethod" in marks or (of_class and "classmethod" not in marks)
                return Definition(one.source, node, one.scopes, 0 if whole else 1)
        return next((m for base in self._bases(one) if (m := self._method(base, name, of_class)) is not None), None)

    # ---------------------------------------------------------------- parameters

    def _parameters(self, one: Definition) -> list[str | None] | None:
        """Those that may be given by position; None for one that has no name for callers. None: not known."""
        node = one.node
        if isinstance(node, ast.ClassDef):
            return self._fields_or_init(one)
        if not KEEP_PARAMETERS.issuperset(decorators(node)):
            return None
        named = [argument.arg for argument in node.args.args]
        return [*[None for _ in node.args.posonlyargs], *named][one.skipped :]

    def _fields_or_init(self, one: Definition) -> list[str | None] | None:
        assert isinstance(one.node, ast.ClassDef)
        if any(isinstance(node, Function) and node.name == "__init__" for node in one.node.body):
            init = self._method(one, "__init__", of_class=False)
            return None if init is None else self._parameters(init)
        if "dataclass" in decorators(one.node):
            return list(self._dataclass_fields(one))
        if any(ast.unparse(base).split(".")[-1] == "NamedTuple" for base in one.node.bases):
            return [name for name, _ in own_fields(one.node)]
        inherited = (self._fields_or_init(base) for base in self._bases(one))
        return next((names for names in inherited if names is not None), None)

    def _dataclass_fields(self, one: Definition) -> dict[str, None]:
        assert isinstance(one.node, ast.ClassDef)
        fields: dict[str, None] = {}
        for base in reversed(list(self._bases(one))):
            if isinstance(base.node, ast.ClassDef) and "dataclass" in decorators(base.node):
                fields |= self._dataclass_fields(base)
        if not any("kw_only=True" in ast.unparse(mark) for mark in one.node.decorator_list):
            for name, node in own_fields(one.node):
                if ast.unparse(node.annotation).endswith("KW_ONLY"):
                    break
                value = "" if node.value is None else ast.unparse(node.value)
                if "init=False" not in value and "kw_only=True" not in value:
                    fields[name] = None
        return fields


def has_many(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this is a call with too many arguments by position, all of them in sight."""
    if not isinstance(node, ast.Call) or len(node.args) <= MOST:
        return False
    return not any(isinstance(one, ast.Starred) for one in node.args)


def own_fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The annotated names of a class, without what belongs to the class itself."""
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(one.annotation):
            yield one.target.id, one


def decorators(node: Function | ast.ClassDef) -> list[str]:
    """The last word of each decorator's name: ``mark`` for all of pytest's marks."""
    names = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    return ["mark" if name.startswith("pytest.mark.") else name.split(".")[-1] for name in names]


def bindings(scope: Scope, path: Path) -> Names:
    """What a module's or function's own names are bound to."""
    found: Names = {}
    if not isinstance(scope, ast.Module):
        arguments = scope.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        found.update({one.arg: None for one in every if one is not None})
    waiting: list[ast.AST] = [scope.body] if isinstance(scope, ast.Lambda) else list(scope.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = None if node.name in found else node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(imported_names(node, path))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def imported_names(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[tuple[str, Imported]]:
    """What an import statement of this file binds."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname is not None or "." not in alias.name:
                yield alias.asname or alias.name, Imported(alias.name, None)
        return
    base: Sequence[str] = path.parts[1 : len(path.parts) - node.level] if node.level else ()
    module = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        yield alias.asname or alias.name, Imported(module, alias.name)


def positional_calls(root: Path) -> list[str]:
    """Each call with more than ``MOST`` arguments by position."""
    return [
        f"{one.source.path}:{one.call.lineno} {ast.unparse(one.call.func)}: {len(one.call.args)} by position"
        for one in Sources(root).find_calls()
    ]
