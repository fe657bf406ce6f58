"""Count what the structure of the code is held to: circles, full folders, upward imports, names, keywords.

    python tools/structure.py            print the figures, and each thing that is counted
    python tools/structure.py --check    exit 1 if a figure is above its bound

That imports go down the layers is import-linter's to check (pyproject.toml, tool.importlinter); counted here
are the exceptions that its contracts are given.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from positional_calls import positional_calls

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "diloco_protocol": "protocol",
    "diloco_syncer": "syncer",
    "diloco_worker": "worker",
    "diloco_operator": "operator",
    "diloco": "cli",
}
MOST_FILES = 14  # in one folder, `__init__.py` included
# Verbs that say nothing without their object: `take_lease` is found by a search, `take` is not.
BARE_VERBS = frozenset({"take", "tell", "note", "look", "hold", "settled"})
# What --check lets pass. A figure only goes down, to 0 and no further up.
BOUNDS = {
    "import circles": 0,
    "full folders": 0,
    "upward imports": 0,
    "twin class names": 0,
    "bare verbs": 0,
    "positional calls": 0,
}


class Module:
    """One file of the product: its dotted name, its path below the repository, its syntax tree."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name = name
        self.path = path
        self.lines = source.count("\n")
        self.tree = ast.parse(source)

    @property
    def generated(self) -> bool:
        return "_pb2" in self.path.name


def read_modules(root: Path, packages: Mapping[str, str] = PACKAGES) -> dict[str, Module]:
    """Every module of the packages, by dotted name; a package's own is its ``__init__``."""
    found = {}
    for package, folder in packages.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            name = ".".join(path.relative_to(root / folder).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path.relative_to(root), path.read_text(encoding="utf-8"))
    return found


def imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    """The known modules that one names in an import, wherever it stands: in a function and behind
    TYPE_CHECKING too. That ``a.b`` loads ``a`` is no import of ``a``."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}".rstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in known else base)
    return (found & known.keys()) - {module.name}


def circles(modules: Mapping[str, Module]) -> list[str]:
    """Groups of modules each of which imports, directly or not, every other of its group (Tarjan)."""
    graph = {name: sorted(imports(module, modules)) for name, module in modules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(" <-> ".join(sorted(group)))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def full_folders(modules: Mapping[str, Module]) -> list[str]:
    """Folders with more files than one takes in at a glance."""
    count = Counter(module.path.parent for module in modules.values())
    return [f"{folder}: {files} files" for folder, files in sorted(count.items()) if files > MOST_FILES]


def upward_imports(pyproject: str) -> list[str]:
    """The imports against the layers that the contracts let pass."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    return [f"{contract['id']}: {line}" for contract in contracts for line in contract.get("ignore_imports", ())]


def twin_classes(modules: Mapping[str, Module]) -> list[str]:
    """Class names that are defined more than once in one package."""
    places = defaultdict(list)
    for module in modules.values():
        if not module.generated:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    places[module.name.partition(".")[0], node.name].append(f"{module.path}:{node.lineno}")
    return [f"{package}.{name}: {', '.join(where)}" for (package, name), where in places.items() if len(where) > 1]


def bare_verbs(modules: Mapping[str, Module]) -> list[str]:
    """Public functions and methods whose whole name is a verb that everything could be called by."""
    return [
        f"{module.path}:{node.lineno} {node.name}"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in BARE_VERBS
    ]


def figures(root: Path) -> dict[str, list[str]]:
    """What is counted -> each thing found."""
    modules = read_modules(root)
    return {
        "import circles": circles(modules),
        "full folders": full_folders(modules),
        "upward imports": upward_imports((root / "pyproject.toml").read_text(encoding="utf-8")),
        "twin class names": twin_classes(modules),
        "bare verbs": bare_verbs(modules),
        "positional calls": positional_calls(root),
    }


def lines_of_code(root: Path) -> Iterator[tuple[str, int]]:
    """Lines of each package, without generated files."""
    for package, folder in PACKAGES.items():
        yield package, sum(m.lines for m in read_modules(root, {package: folder}).values() if not m.generated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="print figures above their bounds only")
    check = parser.parse_args().check
    found = figures(ROOT)
    too_many = {name for name, things in found.items() if len(things) > BOUNDS[name]}
    for name, things in found.items():
        if not check or name in too_many:
            print(f"{name:17} {len(things):6}   (at most {BOUNDS[name]})")
            print("".join(f"    {thing}\n" for thing in things), end="")
    if check:
        return 1 if too_many else 0
    lines = dict(lines_of_code(ROOT))
    print(f"{'lines of code':17} {sum(lines.values()):6}   ({', '.join(f'{p} {n}' for p, n in lines.items())})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
