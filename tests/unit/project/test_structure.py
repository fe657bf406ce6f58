"""tools/structure.py finds what it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import structure

FILES = {
    "__init__": "",
    "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack import b\n",
    "b": "def late():\n    from . import c\n",
    "c": "from .deep.d import D\nclass Twin: ...\n",
    "deep/__init__": "from pack.a import x\n",
    "deep/d": "import pack.deep\nclass D:\n    def take(self): ...\n    def _hold(self): ...\n",
    "deep/e": "import pack.a\nclass Twin: ...\nasync def settled(): ...\ndef take_lease(): ...\n",
    "deep/made_pb2": "class D: ...\n",
}


def write_modules(root: Path, files: dict[str, str]) -> dict[str, structure.Module]:
    for name, text in files.items():
        path = root / "folder" / "pack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.read_modules(root, {"pack": "folder"})


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, structure.Module]:
    return write_modules(tmp_path, FILES)


def test_circles_through_late_imports_and_behind_type_checking(modules: dict[str, structure.Module]) -> None:
    assert structure.imports(modules["pack.c"], modules) == {"pack.deep.d"}
    assert structure.circles(modules) == ["pack.a <-> pack.b <-> pack.c <-> pack.deep <-> pack.deep.d"]
    del modules["pack.b"]
    assert structure.circles(modules) == []


def test_names(modules: dict[str, structure.Module]) -> None:
    (twin,) = structure.twin_classes(modules)
    assert twin == "pack.Twin: folder/pack/c.py:2, folder/pack/deep/e.py:2"
    assert [line.split()[-1] for line in structure.bare_verbs(modules)] == ["take", "settled"]


def test_folders(modules: dict[str, structure.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert structure.full_folders(modules) == []
    monkeypatch.setattr(structure, "MOST_FILES", 3)
    assert structure.full_folders(modules) == ["folder/pack: 4 files", "folder/pack/deep: 4 files"]


def test_circles_of_folders(tmp_path: Path) -> None:
    """A folder leads to another by any of its modules, though no module is in a circle."""
    files = {
        "__init__": "",
        "left/__init__": "",
        "left/a": "from pack.right.b import x\n",
        "left/c": "",
        "right/__init__": "",
        "right/b": "",
        "right/d": "from ..left import c\n",
        "low": "from pack.left.c import y\n",
        "right/deep/__init__": "from pack.right import b\n",
    }
    modules = write_modules(tmp_path, files)
    assert structure.circles(modules) == []
    assert structure.folder_circles(modules) == ["pack: left <-> right"]
    assert structure.folder_arrows(modules) == {
        "pack": {"left": {"right"}, "right": {"left"}, "low": {"left"}},
        "pack.right": {"deep": {"b"}},
    }


def test_programs_beside_each_other_are_named_from_their_folder(tmp_path: Path) -> None:
    write_modules(tmp_path, {"common": "", "one": "import common\nfrom two import z\n", "two": "import one\n"})
    programs = structure.read_modules(tmp_path, {"": "folder/pack"})
    assert structure.circles(programs) == ["one <-> two"]


def test_folders_without_a_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"__init__": "", "one/__init__": "", "one/a": "import pack.one.b, pack.one.c\n", "one/b": "", "one/c": ""}
    modules = write_modules(tmp_path, files)
    nothing = "[tool.importlinter]\ncontracts = []\n"
    assert structure.without_contract(modules, nothing) == []
    monkeypatch.setattr(structure, "ORDERED_FROM", 2)
    assert structure.without_contract(modules, nothing) == ["pack.one: imports inside it: 2"]
    contract = '[[tool.importlinter.contracts]]\nid = "x"\ncontainers = ["pack.one"]\n'
    assert structure.without_contract(modules, contract) == ["pack.one: imports inside it: 2"]
    assert structure.without_contract(modules, contract + "exhaustive = true\n") == []


def test_long_functions(modules: dict[str, structure.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert structure.long_functions(modules) == []
    monkeypatch.setattr(structure, "MOST_FUNCTION_LINES", 1)
    assert structure.long_functions(modules) == ["folder/pack/b.py:1 late: 2 lines"]


def test_lines(modules: dict[str, structure.Module]) -> None:
    assert structure.package_lines(modules) == {"pack": 16}  # without what is generated


def test_a_figure_above_its_bound_is_red(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--check prints that figure alone, with its bound and the bound's reason."""
    monkeypatch.setattr(sys, "argv", ["structure.py", "--check"])
    monkeypatch.setattr(structure, "figures", lambda root: {"bare verbs": (2, ["x", "y"]), "import circles": (0, [])})
    assert structure.main() == 1
    first, *things = capsys.readouterr().out.splitlines()
    assert first.split()[:6] == ["bare", "verbs", "2", "at", "most", "0:"] and first.endswith("its verb and its object")
    assert things == ["    x", "    y"]


def test_upward_imports() -> None:
    text = '[[tool.importlinter.contracts]]\nid = "x"\nignore_imports = ["p.a -> p.b"]\n'
    assert structure.upward_imports(text) == ["x: p.a -> p.b"]


@pytest.mark.slow  # make lint asks the same
def test_the_product_is_within_the_bounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["structure.py", "--check"])
    assert structure.main() == 0, capsys.readouterr().out
    assert structure.BOUNDS.keys() == structure.figures(ROOT).keys()
    assert structure.figures(ROOT)["lines of product"][0] > 30_000
