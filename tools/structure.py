"""Count what the structure of the code is held to: circles, sizes, upward imports, names, keywords. Each has a bound.

    python tools/structure.py            print the figures, and each thing that is counted
    python tools/structure.py --check    exit 1 if a figure is above its bound

That imports go down the layers is import-linter's to check (pyproject.toml, tool.importlinter). Counted here are the
exceptions that its contracts are given, and the folders that have no contract.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
BENCHES = {"": "bench"}  # programs, which name each other as `common` and `trials.tables`
MOST_FILES = 14  # in one folder, `__init__.py` included: what one takes in at a glance
MOST_FUNCTION_LINES = 100  # from `def` to the last line: two screens
ORDERED_FROM = 4  # imports between the modules of a folder; with fewer the order needs no contract
# Verbs that say nothing without their object: `take_lease` is found by a search, `take` is not.
BARE_VERBS = frozenset({"take", "tell", "note", "look", "hold", "settled"})


@dataclass(frozen=True, slots=True)
class Bound:
    """How much of a figure --check lets pass, and why so much."""

    most: int
    reason: str


# A bound falls when its figure does. It is raised only with its reason beside it.
BOUNDS = {
    "lines of product": Bound(
        70_500,
        "60,500 without its laboratory, and 2,500 each for jobs that end well with the wrong model, for stores, "
        "words and bounds that hold whatever others do, for learners of many devices, and for a hub of the paper's "
        "size",
    ),
    "lines of cli": Bound(17_990, "15,500 without its laboratory, and a third of those 7,500"),
    "import circles": Bound(0, "of two modules that need each other neither can be read first"),
    "folder circles": Bound(0, "folders that need each other are headings and no layers"),
    "bench circles": Bound(0, "of two programs that need each other neither can be read first"),
    "full folders": Bound(0, f"a folder of more than {MOST_FILES} files needs a folder inside"),
    "long functions": Bound(0, f"what is longer than {MOST_FUNCTION_LINES} lines has parts that have names"),
    "upward imports": Bound(0, "an import that a contract is told to ignore is an import that it forbids"),
    "folders without a contract": Bound(0, "without an order written down an import in any direction looks right"),
    "twin class names": Bound(0, "a class is found by its name"),
    "bare verbs": Bound(0, "a function is found by its verb and its object"),
    "positional calls": Bound(0, "of five values in a row nobody sees which is which"),
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
    """Every module of the packages, by dotted name; a package's own is its ``__init__``. A package without a name is
    a folder of programs: its modules are named from there."""
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


def groups(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The groups of names each of which leads, directly or not, to every other of its group (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def circles(modules: Mapping[str, Module]) -> list[str]:
    """Modules each of which imports, directly or not, every other of its circle."""
    graph = {name: sorted(imports(module, modules)) for name, module in modules.items()}
    return [" <-> ".join(group) for group in groups(graph)]


def folder_arrows(modules: Mapping[str, Module]) -> dict[str, dict[str, set[str]]]:
    """Of each folder: what is in it (a module, or a folder with all of its modules) -> what else of it that imports."""
    arrows: dict[str, dict[str, set[str]]] = {}
    for name, module in modules.items():
        for other in imports(module, modules):
            ours, theirs = name.split("."), other.split(".")
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            # None: of a folder's own ``__init__`` and a module below it. Between packages: the first contract's.
            if same:
                arrows.setdefault(".".join(ours[:same]), {}).setdefault(ours[same], set()).add(theirs[same])
    return arrows


def folder_circles(modules: Mapping[str, Module]) -> list[str]:
    """Of each folder: what in it leads to each other, at least one of it a folder, by imports of any module inside."""
    return [
        f"{folder}: {' <-> '.join(group)}"
        for folder, arrows in folder_arrows(modules).items()
        for group in groups({name: sorted(others) for name, others in arrows.items()})
        if any(name.startswith(f"{folder}.{inside}.") for inside in group for name in modules)
    ]


def without_contract(modules: Mapping[str, Module], pyproject: str) -> list[str]:
    """Folders that have folders inside, or modules that import each other in an order, and no exhaustive contract."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    ordered = {container for each in contracts if each.get("exhaustive") for container in each["containers"]}
    found = []
    for folder, arrows in sorted(folder_arrows(modules).items()):
        number = sum(map(len, arrows.values()))
        inside = {name.removeprefix(f"{folder}.") for name in modules if name.startswith(f"{folder}.")}
        nested = any("." in name for name in inside)
        if (nested or number >= ORDERED_FROM) and folder not in ordered:
            found.append(f"{folder}: imports inside it: {number}")
    return found


def full_folders(modules: Mapping[str, Module]) -> list[str]:
    """Folders with more files than one takes in at a glance."""
    count = Counter(module.path.parent for module in modules.values())
    return [f"{folder}: {files} files" for folder, files in sorted(count.items()) if files > MOST_FILES]


def long_functions(modules: Mapping[str, Module]) -> list[str]:
    """Functions of more lines than are read in one go."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    found.append(f"{module.path}:{node.lineno} {node.name}: {lines} lines")
    return found


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


def package_lines(modules: Mapping[str, Module]) -> dict[str, int]:
    """Lines of each package, without generated files."""
    lines: Counter[str] = Counter()
    for module in modules.values():
        if not module.generated:
            lines[module.name.partition(".")[0]] += module.lines
    return dict(lines)


def figures(root: Path) -> dict[str, tuple[int, list[str]]]:
    """What is counted -> how much of it there is, and each thing found."""
    modules = read_modules(root)
    benches = read_modules(root, BENCHES)
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    lines = package_lines(modules)
    found = {
        "import circles": circles(modules),
        "folder circles": folder_circles(modules),
        "bench circles": circles(benches) + folder_circles(benches),
        "full folders": full_folders(modules),
        "long functions": long_functions(modules),
        "upward imports": upward_imports(pyproject),
        "folders without a contract": without_contract(modules, pyproject),
        "twin class names": twin_classes(modules),
        "bare verbs": bare_verbs(modules),
        "positional calls": positional_calls(root),
    }
    return {
        "lines of product": (sum(lines.values()), [f"{package}: {number}" for package, number in lines.items()]),
        "lines of cli": (lines["diloco"], []),
        **{name: (len(things), things) for name, things in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="print figures above their bounds only")
    check = parser.parse_args().check
    too_many = False
    for name, (number, things) in figures(ROOT).items():
        above = number > BOUNDS[name].most
        too_many |= above
        if not check or above:
            print(f"{name:26} {number:6}   at most {BOUNDS[name].most}: {BOUNDS[name].reason}")
            print("".join(f"    {thing}\n" for thing in things), end="")
    return 1 if check and too_many else 0


if __name__ == "__main__":
    sys.exit(main())
