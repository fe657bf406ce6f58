"""Packages that only some commands need: which of them are not installed, and the extra that brings them.

What each extra holds is read from this package's own metadata. Nothing is imported to find out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence

DISTRIBUTION = "decoupled-diloco"
HERE = ("syncer", "worker")
"""The extras that a run on this machine needs; the extra `local` is both."""


def packages_of(extra: str) -> list[str]:
    """The packages of an extra, as they are installed; empty where there is no metadata to read."""
    from importlib import metadata  # every command loads this module

    try:
        required = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return []
    found = (re.match(r"""([A-Za-z0-9._-]+).*extra\s*==\s*["']([a-z]+)["']""", line) for line in required)
    return [match[1] for match in found if match and match[2] == extra]


def is_installed(package: str) -> bool:
    """Whether a package of one of the extras can be imported; each is called as its module is."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def absent_packages(extras: Iterable[str]) -> list[str]:
    """Packages of these extras that are not installed, each once."""
    return [one for one in dict.fromkeys(p for extra in extras for p in packages_of(extra)) if not is_installed(one)]


def absent_text(packages: Sequence[str], which: str = "") -> str:
    """Which packages are not installed, with the fix. ``which``: a word between their names and the verb."""
    verb = "is" if len(packages) == 1 else "are"
    return f"{', '.join(packages)}{which} {verb} not installed: pip install '{DISTRIBUTION}[local]'"


class PackagesMissing(ImportError):
    """A command cannot be run without packages that are not installed; the message names them and the extra."""


def require_packages(what: str, extras: Iterable[str] = HERE) -> None:
    """Raise PackagesMissing unless all packages that ``what`` needs are installed."""
    if absent := absent_packages(extras):
        raise PackagesMissing(f"{what} needs {absent_text(absent, ', which')}")


def import_text(error: ImportError) -> str:
    """What to say of an import that failed; empty: no package of an extra is missing, the fault is in the code."""
    if isinstance(error, PackagesMissing):
        return str(error)
    module = (error.name or "").partition(".")[0]
    missing = [p for extra in HERE for p in packages_of(extra) if p.replace("-", "_") == module and not is_installed(p)]
    return absent_text(missing[:1]) if missing else ""
