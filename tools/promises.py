"""Promises of the system, each a marker at the tests that hold it: ``@pytest.mark.promise("…")``.

docs/reliability.md and the head of `.ci/run` are made of them (tools/generate.py). Test files are read, not imported.

A promise is one text. It may stand at several tests, and a test, a class, a file (``pytestmark``) or a case
(``pytest.param(…, marks=…)``) may hold several. Its section follows from where its tests are; ``section="…"`` is for a
subject that has tests in several folders.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Sections of the page, in order, with the folders whose promises they have. A promise with tests in several folders is
# in the first of their sections.
SECTIONS = {
    "Operator": ("tests/unit/operator/",),
    "Syncer": ("tests/unit/syncer/", "tests/integration/syncer/"),
    "Hostile callers": ("tests/integration/hostile/",),
    "Worker": ("tests/unit/worker/", "tests/integration/worker/"),
    "Command line": ("tests/unit/cli/", "tests/integration/run/"),
    "Connections and job files": ("tests/unit/protocol/", "tests/integration/tls/"),
    "Installation and project": ("tests/unit/project/",),
    "Real clusters": ("tests/e2e/",),
}
ALIKE = 0.7  # of the words of two texts: more in common, and one of them is meant for the other


@dataclass(frozen=True)
class Promise:
    """A text with the place of its marker: a file, or a test as pytest names it."""

    text: str
    section: str | None
    place: str


@dataclass
class MarkedTest:
    """A test function with its marks and promises, those of its class, file and cases included."""

    path: str
    name: str
    marks: set[str] = field(default_factory=set)
    promises: list[Promise] = field(default_factory=list)


class _Reader:
    """Reads one file's tests."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.tree = ast.parse(source)
        self.tests: list[MarkedTest] = []
        self.placed: set[int] = set()  # promises that were found at a test
        self.names: dict[str, ast.expr] = {}  # marks that a file names: slow = pytest.mark.slow
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names[node.targets[0].id] = node.value

    def read(self) -> list[MarkedTest]:
        """The tests. Raises ValueError for a promise that stands at no test, or is no plain text."""
        whole = self.marks([self.names["pytestmark"]] if "pytestmark" in self.names else [], self.path)
        self.read_body(self.tree.body, "", *whole)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _mark_name(node.func) == "promise" and id(node) not in self.placed:
                raise ValueError(f"{self.path}:{node.lineno}: a promise that stands at no test")
        return self.tests

    def read_body(self, body: list[ast.stmt], prefix: str, marks: set[str], promises: list[Promise]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                name = f"{prefix}{node.name}"
                own, held = self.marks(node.decorator_list, f"{self.path}::{name}")
                self.read_body(node.body, f"{name}::", marks | own, [*promises, *held])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                name = f"{prefix}{node.name}"
                own, held = self.marks(node.decorator_list, f"{self.path}::{name}")
                test = MarkedTest(self.path, name, marks | own, [*promises, *held])
                self.read_cases(node.decorator_list, test)
                self.tests.append(test)

    def read_cases(self, decorators: list[ast.expr], test: MarkedTest) -> None:
        """Add the marks of ``pytest.param(…, marks=…)``."""
        for node in (node for decorator in decorators for node in ast.walk(decorator)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "param":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                case = given.get("id") or (node.args[0] if len(node.args) == 1 else None)
                if "marks" in given:
                    name = f"[{case.value!s}]" if isinstance(case, ast.Constant) else ""
                    own, held = self.marks([given["marks"]], f"{self.path}::{test.name}{name}")
                    test.marks |= own
                    test.promises += held

    def marks(self, nodes: Iterable[ast.expr], place: str) -> tuple[set[str], list[Promise]]:
        marks, promises = set[str](), list[Promise]()
        for name, call in (mark for node in nodes for mark in self.resolve(node)):
            marks.add(name)
            if name == "promise":
                promises.append(self.promise(call, place))
        return marks, promises

    def resolve(self, node: ast.expr) -> Iterator[tuple[str, ast.Call | None]]:
        """The marks that an expression is, each with its call."""
        if isinstance(node, ast.List | ast.Tuple):
            for each in node.elts:
                yield from self.resolve(each)
        elif isinstance(node, ast.Name) and node.id in self.names:
            yield from self.resolve(self.names[node.id])
        elif isinstance(node, ast.Call):
            name = _mark_name(node.func)
            if name is not None:
                yield name, node
        else:
            name = _mark_name(node)
            if name is not None:
                yield name, None

    def promise(self, call: ast.Call | None, place: str) -> Promise:
        given = {} if call is None else {keyword.arg: keyword.value for keyword in call.keywords}
        values = [*(call.args if call is not None else ()), *given.values()]
        if call is None or len(call.args) != 1 or not given.keys() <= {"section"} or not all(map(_is_text, values)):
            raise ValueError(f'{place}: write promise("…"), or promise("…", section="…")')
        self.placed.add(id(call))
        text, section = (ast.literal_eval(call.args[0]), ast.literal_eval(given["section"]) if given else None)
        return Promise(text, section, place)


def _mark_name(node: ast.expr) -> str | None:
    """``slow`` of ``pytest.mark.slow``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark":
        return node.attr
    return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def read_tests(root: Path, mark: str = "promise") -> list[MarkedTest]:
    """All tests of the files that name this mark, in the order of files and lines."""
    tests = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if f"mark.{mark}" in source:
            tests += _Reader(path.relative_to(root).as_posix(), source).read()
    return tests


def places_by_promise(tests: Iterable[MarkedTest]) -> dict[str, list[Promise]]:
    """Each text with its markers, in the order of their tests."""
    found: dict[str, dict[str, Promise]] = {}
    for test in tests:
        for promise in test.promises:
            found.setdefault(promise.text, {}).setdefault(promise.place, promise)
    return {text: list(markers.values()) for text, markers in found.items()}


def section_of(markers: Iterable[Promise]) -> str:
    """The section of a promise. Raises ValueError if no section has its folder."""
    places = []
    for marker in markers:
        if marker.section is not None:
            return marker.section
        places.append(marker.place)
    for section, folders in SECTIONS.items():
        if any(place.startswith(folders) for place in places):
            return section
    raise ValueError(f"{places[0]}: no section of tools/promises.py has this folder")


def problems(tests: Iterable[MarkedTest]) -> list[str]:
    """What is wrong with promises: one in two sections or in almost the same words, a text that fits no cell."""
    wrong = []
    found = places_by_promise(tests)
    words = {text: set(re.findall(r"\w+", text.lower())) for text in found}
    for text, markers in found.items():
        sections = {marker.section for marker in markers}
        if len(sections) > 1 or not sections <= {None, *SECTIONS}:
            wrong.append(f"{markers[0].place}: give {text!r} one section of tools/promises.py at all of its tests")
        if not text or text != text.strip() or text.endswith(".") or "|" in text or "\n" in text:
            wrong.append(f"{markers[0].place}: {text!r} is no sentence for a table's cell, without a full stop")
    for one, other in itertools.combinations(found, 2):
        if len(words[one] & words[other]) > ALIKE * len(words[one] | words[other]):
            wrong.append(f"{found[other][0].place}: write {other!r} as at {found[one][0].place}, or in other words")
    return wrong


def cell(places: Iterable[str]) -> str:
    """Tests as pytest names them; ``::name`` alone is in the file named before it."""
    words, last = [], ""
    for place in places:
        path, found, name = place.partition("::")
        words.append(f"`::{name}`" if found and path == last else f"`{place}`")
        last = path
    return ", ".join(words)


def tables(root: Path = ROOT) -> dict[str, str]:
    """The tables of docs/reliability.md by section. Raises ValueError if a promise is written in two ways."""
    tests = read_tests(root)
    if wrong := problems(tests):
        raise ValueError("\n".join(wrong))
    order = list(dict.fromkeys(promise.place for test in tests for promise in test.promises))
    rows: dict[str, list[tuple[tuple[bool, int], str]]] = {section: [] for section in SECTIONS}
    for text, markers in places_by_promise(tests).items():
        section = section_of(markers)
        # The tests in the section's folders come first, and the rows follow their order.
        ranks = {m.place: (not m.place.startswith(SECTIONS[section]), order.index(m.place)) for m in markers}
        places = sorted(ranks, key=ranks.__getitem__)
        rows[section].append((ranks[places[0]], f"| {text} | {cell(places)} |"))
    head = ["| promise | test |", "|---|---|"]
    return {section: "\n".join([*head, *(row for _, row in sorted(found))]) for section, found in rows.items()}


def held(mark: str, root: Path = ROOT) -> list[tuple[str, str]]:
    """Each place of the tests with this mark, with the promise that it holds; an empty text for a test without one."""
    found: dict[tuple[str, str], None] = {}
    for test in read_tests(root, mark):
        if mark in test.marks:
            places = [(promise.place, promise.text) for promise in test.promises]
            found |= dict.fromkeys(places or [(f"{test.path}::{test.name}", "")])
    return list(found)


# The parts of `.ci/run` that run tests marked ci, with the folder that has them; the last that fits counts.
GATE_PARTS = {"programs": "tests/", "cluster": "tests/e2e/", "regions": "tests/e2e/regions/"}
GATE_HEAD = "# What each of their tests holds (tools/generate.py):\n"


def gate_head(script: str, root: Path = ROOT) -> str:
    """`.ci/run` with a line for each test that its last parts run: the part, the test, and the promise it holds.
    Raises ValueError if a test holds none, or the script has no place for the lines."""
    head, found, rest = script.partition(GATE_HEAD)
    if not found:
        raise ValueError(f"the script lacks the line {GATE_HEAD!r}")
    rows: dict[str, list[str]] = {part: [] for part in GATE_PARTS}
    for place, text in held("ci", root):
        if not text:
            raise ValueError(f"{place}: a test that .ci/run runs holds a promise: mark it")
        part = max(
            (part for part in GATE_PARTS if place.startswith(GATE_PARTS[part])), key=lambda p: len(GATE_PARTS[p])
        )
        rows[part].append(f"#   {part:9} {place.rpartition('::')[2].removeprefix('test_')}: {text}\n")
    tail = "".join(itertools.dropwhile(lambda line: line.startswith("#   "), rest.splitlines(keepends=True)))
    return head + found + "".join(row for part in rows.values() for row in part) + tail
