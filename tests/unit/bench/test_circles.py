"""No circle of imports among the modules of bench/, late ones and those behind TYPE_CHECKING included."""

from __future__ import annotations

import sys

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import structure


def test_bench_has_no_circle_of_imports() -> None:
    modules = structure.read_modules(ROOT, {"lab": "bench", "trials": "bench"})
    for path in (ROOT / "bench").glob("*.py"):
        modules[path.stem] = structure.Module(path.stem, path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    assert structure.imports(modules["chaos"], modules) >= {"common", "lab.compare.command"}
    assert structure.circles(modules) == []
