"""What an import really loads, as a process meets it.

The linter reads source; this runs it. Each package, and every module of the
packages that must stay without torch, is imported in a fresh interpreter, and
sys.modules says what came along.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

HEAVY = ("torch", "transformers", "datasets", "tensorboard", "matplotlib")

# Imports every module of a package except programs (`__main__`), then prints what is loaded.
PROBE = """
import importlib, json, os, pkgutil, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
threads = len(os.listdir("/proc/self/task"))
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
used = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"modules": names, "loaded": loaded, "threads": threads, "device_used": used}))
"""


def probe(package: str, *first: str) -> dict[str, Any]:
    """``modules`` of the package, ``loaded``: top-level names in sys.modules once all of them are imported;
    ``threads`` after the modules ``first``, which are imported before; ``device_used``: CUDA was."""
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the runner starts the fork server
    done = subprocess.run(
        [sys.executable, "-c", PROBE, package, *first],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("package", "closed"),
    [
        ("diloco_protocol", ("diloco_syncer", "diloco_worker", "diloco")),
        ("diloco_syncer", ("diloco_worker", "diloco")),
        ("diloco_operator", ("diloco_syncer", "diloco_worker", "diloco")),
        ("diloco", ("kubernetes", "urllib3", "websocket", "kopf")),
    ],
)
def test_importing_every_module_of_a_package_loads_no_torch(package: str, closed: tuple[str, ...]) -> None:
    found = probe(package)
    modules, loaded = found["modules"], set(found["loaded"])
    assert modules, f"{package} has no modules: the probe looked at nothing"
    assert package in loaded
    assert not loaded & set(HEAVY)
    assert not loaded & set(closed)


def test_the_worker_knows_neither_syncer_nor_command_line_and_importing_the_trainer_starts_nothing() -> None:
    """The fork server forks after these imports: no thread, no RPC core, nothing of CUDA."""
    trainer = ("torch", "diloco_worker.__main__", "diloco_worker.training.trainer", "diloco_worker.training.evaluator")
    found = probe("diloco_worker", *trainer)
    assert found["modules"]
    assert "torch" in found["loaded"], "the probe would not see torch elsewhere if it does not see it here"
    assert not set(found["loaded"]) & {"diloco_syncer", "diloco"}
    assert found["threads"] == 1 and not found["device_used"]


@pytest.mark.slow  # make lint asks the same
def test_the_linters_contracts_are_kept() -> None:
    """The same contracts that `make lint` checks (pyproject.toml, tool.importlinter)."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names_of(module: str) -> set[str] | None:
    """What a module of ours holds at its top: names that it defines or imports, and its sub-modules. None: there is
    no such module."""
    path = Path(*module.split("."))
    for folder in ("protocol", "syncer", "worker", "operator", "cli", "bench"):
        for file in (ROOT / folder / path.with_suffix(".py"), ROOT / folder / path / "__init__.py"):
            if file.exists():
                found = {each.stem for each in file.parent.iterdir()} if file.name == "__init__.py" else set()
                for top in ast.parse(file.read_text(encoding="utf-8")).body:
                    within = (
                        [top]
                        if isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                        else ast.walk(top)
                    )
                    for node in within:
                        match node:
                            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                                found.add(node.name)
                            case ast.alias():
                                found.add((node.asname or node.name).partition(".")[0])
                            case ast.Name(ctx=ast.Store()):
                                found.add(node.id)
                return found
    return None


def test_what_is_run_seldom_imports_what_is_there() -> None:
    """Tests that need a cluster, benches, tools: they import when they run, which may be long after a change."""
    imports = [
        (path, node.module, alias.name)
        for folder in ("tests/e2e", "bench", "tools", "examples", ".ci")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and re.match(r"(diloco|lab|trials)\b|diloco_", node.module or "")
        for alias in node.names
    ]
    assert len(imports) > 150
    generated = ("sync_pb2",)
    held = {module: names_of(module) for _, module, _ in imports}
    absent = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, module, name in imports
        if not module.endswith(generated) and name not in (held[module] or set())
    ]
    assert not absent, absent


def imported_by(path: Path) -> set[str]:
    """The top-level names that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_the_product_imports_nothing_that_is_in_bench() -> None:
    """The contract in pyproject.toml names the packages there; scripts there are modules, too."""
    packages = {path.parent.name for path in (ROOT / "bench").glob("*/__init__.py")}
    there = packages | {path.stem for path in (ROOT / "bench").glob("*.py")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (one for one in settings["contracts"] if one["id"] == "bench")
    assert set(contract["forbidden_modules"]) == packages
    assert set(contract["source_modules"]) == set(settings["root_packages"])
    imported = {
        path.relative_to(ROOT): imported_by(path)
        for folder in ("protocol", "syncer", "worker", "operator", "cli")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(imported) > 300
    assert not {path: names & there for path, names in imported.items() if names & there}
