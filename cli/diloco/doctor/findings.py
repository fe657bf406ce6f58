"""What was looked at, how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from diloco.console import wrapped

Level = Literal["ok", "warning", "error"]
_INDENT = " " * 23


@dataclass(frozen=True, slots=True)
class Finding:
    """``about``: what was looked at. ``error``: something would fail; ``fix`` is what to do, empty: nothing."""

    section: Literal["machine", "packages", "gpu", "cluster", "job", "links", "program"]
    about: str
    level: Level
    said: str
    fix: str = ""

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def findings_text(findings: Iterable[Finding]) -> str:
    """One line for each, with its fix below it, and how many are bad."""
    lines, section = list[str](), ""
    found = list(findings)
    for one in found:
        if one.section != section:
            section = one.section
            lines += ([""] if lines else []) + [section]
        lines += wrapped(" ".join(one.said.split()), f"  {one.level:<8} {one.about:<11} ", _INDENT)
        if one.fix:
            lines += wrapped(" ".join(f"fix: {one.fix}".split()), _INDENT)
    errors, warnings = (sum(one.level == level for one in found) for level in ("error", "warning"))
    counted = [
        f"{count} {word}{'s' * (count > 1)}" for count, word in ((errors, "error"), (warnings, "warning")) if count
    ]
    return "\n".join([*lines, "", ", ".join(counted) if counted else "no problem found"])
