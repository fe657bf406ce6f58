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


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, structure.Module]:
    for name, text in FILES.items():
        path = tmp_path / "folder" / "pack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.read_modules(tmp_path, {"pack": "folder"})


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


def test_upward_imports() -> None:
    text = '[[tool.importlinter.contracts]]\nid = "x"\nignore_imports = ["p.a -> p.b"]\n'
    assert structure.upward_imports(text) == ["x: p.a -> p.b"]


@pytest.mark.slow  # make lint asks the same
@pytest.mark.untimed
def test_the_product_is_within_the_bounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["structure.py", "--check"])
    assert structure.main() == 0, capsys.readouterr().out
    assert sum(lines for _, lines in structure.lines_of_code(ROOT)) > 30_000
