"""Write requirements.lock: the exact versions that this environment runs.

The lock is a constraints file: it names every distribution that our extras
bring in, at the version installed here, and nothing else that happens to be
in the environment. Local version suffixes (torch's ``+cpu``) are cut off, so
that one file serves every build of a version, and no index is named.

`make lock` runs it. tools/generate.py asks whether pyproject.toml asks for something that the lock lacks.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Exact versions of everything that the extras of pyproject.toml bring in.
# Written by `make lock`; `make setup` installs under these constraints.
"""


def direct_requirements() -> list[Requirement]:
    """Every requirement that pyproject.toml states, over all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    return [Requirement(line) for line in lines]


def closure(wanted: list[Requirement]) -> dict[str, str]:
    """Canonical name -> installed version, over `wanted` and all that they require.

    Raises SystemExit, naming it, when a requirement is not installed or is
    installed at a version that it does not allow.
    """
    pins: dict[str, str] = {}
    queue = [(requirement, frozenset(requirement.extras), "pyproject.toml") for requirement in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement, extras, by = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"lock: {name} (required by {by}) is not installed: run make setup") from None
        version = Version(distribution.version)
        if not requirement.specifier.contains(version.public, prereleases=True):
            raise SystemExit(f"lock: {name} {version} is installed, but {by} asks for {requirement.specifier}")
        pins[name] = version.public
        for line in distribution.requires or []:
            child = Requirement(line)
            environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            if child.marker is None or any(child.marker.evaluate(e) for e in environments):
                queue.append((child, frozenset(child.extras), name))
    return pins


def locked() -> dict[str, Version]:
    """The pins of requirements.lock as it lies there."""
    pins = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = Version(version)
    return pins


def problems() -> list[str]:
    """What pyproject.toml asks for and the lock lacks."""
    pins = locked()
    found = []
    for requirement in direct_requirements():
        name = canonicalize_name(requirement.name)
        if name not in pins:
            found.append(f"{name} is in pyproject.toml but not in requirements.lock")
        elif not requirement.specifier.contains(pins[name], prereleases=True):
            found.append(f"{name}: the lock has {pins[name]}, pyproject.toml asks for {requirement.specifier}")
    return found


def main() -> int:
    pins = closure(direct_requirements())
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
    temporary = LOCK.with_suffix(".lock.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(LOCK)
    print(f"{LOCK.name}: {len(pins)} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
