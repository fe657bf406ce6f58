"""tools/positional_calls.py finds the calls whose values have no names, by the definitions that they reach."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import positional_calls

DEFINITIONS = """
import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, NamedTuple, Protocol

def plain(a, b, c, d, e, f=0): ...
def starred(a, b, *rest): ...
def unnamed(a, b, c, d, e, f, /, g): ...
@compiled
def kernel(a, b, c, d, e): ...

@dataclass
class Base:
    a: int
    b: int = 0
    kind: ClassVar[str] = ""

@dataclasses.dataclass(frozen=True)
class Derived(Base):
    c: int = 0
    made: int = field(init=False)
    d: int = 0
    e: int = 0
    f: int = 0
    _: KW_ONLY
    g: int = 0

class Row(NamedTuple):
    a: int
    b: int
    c: int
    d: int
    e: int

class Made:
    def __init__(self, a, b, c, d, e): ...
    @classmethod
    def build(cls, a, b, c, d, e):
        return cls(a, b, c, d, e)
    @staticmethod
    def check(a, b, c, d, e): ...
    def change(self, a, b, c, d, e):
        self.change(a, b, c, d, e)

class Child(Made):
    def __init__(self):
        super().__init__(1, 2, 3, 4, 5)
"""
CALLS = [
    ("plain(1, 2, 3, 4, 5, 6)", ["e", "f"]),
    ("plain(1, 2, 3, 4, e=5)", []),
    ("plain(1, 2, 3, *rest)", []),
    ("plain(1, 2, 3, 4, 5, **more)", ["e"]),
    ("lib.plain(1, 2, 3, 4, 5)", ["e"]),
    ("pack.lib.plain(1, 2, 3, 4, 5)", []),  # not bound by what is imported below
    ("again(1, 2, 3, 4, 5)", ["e"]),
    ("starred(1, 2, 3, 4, 5)", []),
    ("unnamed(1, 2, 3, 4, 5, 6, 7)", ["g"]),
    ("kernel(1, 2, 3, 4, 5)", []),
    ("Derived(1, 2, 3, 4, 5, 6)", ["e", "f"]),
    ("Row(1, 2, 3, 4, 5)", ["e"]),
    ("Made(1, 2, 3, 4, 5)", ["e"]),
    ("Made.build(1, 2, 3, 4, 5)", ["e"]),
    ("Made.check(1, 2, 3, 4, 5)", ["e"]),
    ("Made.change(one, 1, 2, 3, 4, 5)", ["d", "e"]),
    ("one.change(1, 2, 3, 4, 5)", []),
    ("Child(1, 2, 3, 4, 5)", []),  # too many: a mistake, and not this one
    ("print(1, 2, 3, 4, 5)", []),
]


def found(root: Path, **files: str) -> list[tuple[str, list[str]]]:
    for name, text in files.items():
        path = root / "cli" / "pack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [(one.source.path.stem, one.names) for one in positional_calls.Sources(root).find_calls()]


@pytest.mark.parametrize(("call", "names"), CALLS)
def test_names_of_late_arguments(tmp_path: Path, call: str, names: list[str]) -> None:
    imports = "from pack import lib, relay\nfrom pack.relay import again\nfrom .lib import Child, Derived, Made, Row\n"
    imports += "from pack.lib import kernel, plain, starred, unnamed\n"
    relay, caller = "from pack.lib import plain as again\n", f"{imports}def test(one, rest, more):\n    {call}\n"
    calls = found(tmp_path, __init__="", lib=DEFINITIONS, relay=relay, caller=caller)
    assert [late for stem, late in calls if stem == "caller"] == ([names] if names else [])
    assert sum(stem == "lib" for stem, _ in calls) == 3, "cls, self and super"


@pytest.mark.parametrize(
    "caller",
    [
        "def use(plain):\n    plain(1, 2, 3, 4, 5)\n",
        "def use():\n    for plain in []:\n        plain(1, 2, 3, 4, 5)\n",
        "def use():\n    plain = other\n    def inner():\n        plain(1, 2, 3, 4, 5)\n",
        "use = lambda plain: plain(1, 2, 3, 4, 5)\n",
    ],
)
def test_a_value_is_not_taken_for_the_function_of_its_name(tmp_path: Path, caller: str) -> None:
    lib = "def plain(a, b, c, d, e): ...\n"
    assert found(tmp_path, lib=lib, caller=f"from pack.lib import plain\n{caller}") == []


def test_functions_in_functions_are_found(tmp_path: Path) -> None:
    caller = "def use():\n    def inner(a, b, c, d, e): ...\n    return [inner(1, 2, 3, 4, x) for x in range(3)]\n"
    assert found(tmp_path, caller=caller) == [("caller", ["e"])]


def test_a_test_finds_the_helpers_beside_and_above_it(tmp_path: Path) -> None:
    for path, text in {
        "tests/helpers.py": "def make(a, b, c, d, e): ...\n",
        "tests/unit/test_it.py": "from helpers import make\nmake(1, 2, 3, 4, 5)\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert positional_calls.positional_calls(tmp_path) == ["tests/unit/test_it.py:2 make: 5 by position"]
