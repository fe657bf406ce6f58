"""The stacks of sub-packages in docs/architecture.md, from the import contracts of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def tables() -> dict[str, str]:
    """The part of the page by its name."""
    return {"stacks": stacks(PYPROJECT.read_text(encoding="utf-8"))}


def stacks(pyproject: str) -> str:
    """A table of every package with a contract of layers, each with its layers from the top down."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    cores = {core for one in contracts if one["id"] == "functional-core" for core in one["source_modules"]}
    rows = ["| package | its layers, from the top down |", "|---|---|"]
    for contract in contracts:
        for package in contract.get("containers", ()):
            layers = [_layer(package, line, cores) for line in contract["layers"]]
            rows.append(f"| `{package}` | {' → '.join(layers)} |")
    return "\n".join(rows)


def _layer(package: str, line: str, cores: set[str]) -> str:
    """The sub-packages of one layer, which do not import each other; functional cores are bold."""
    names = [name.strip() for name in line.replace(":", "|").split("|")]
    return ", ".join(f"**`{name}`**" if f"{package}.{name}" in cores else f"`{name}`" for name in names)
