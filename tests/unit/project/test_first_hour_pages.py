"""The pages of tests/first_hour name tests that are there, and paths from the index as short as they say."""

from __future__ import annotations

import re

from repository import ROOT

HOUR = (ROOT / "tests" / "first_hour" / "hour.md").read_text(encoding="utf-8")


def test_the_findings_that_could_not_be_imported_have_their_tests() -> None:
    rows = re.findall(r"^\| ([HM]\d+) \| [^|]+ \| ([^|]+) \|$", HOUR, re.M)
    assert [finding for finding, _ in rows] == [
        *("H2", "H5", "H7", "M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8", "M9", "M10", "M13", "M14", "M16", "M19")
    ]
    assert f"- {len(rows)} files cannot be imported" in HOUR
    for finding, tests in rows:
        source = ""
        for file, name in re.findall(r"`([\w.]*)::(\w+)`", tests):
            source = (ROOT / "tests" / "first_hour" / file).read_text(encoding="utf-8") if file else source
            assert file.startswith(f"test_{finding.lower()}_") or not file
            assert re.search(rf"^(?:async )?def {name}\(", source, re.M), f"{finding}: {name}"
