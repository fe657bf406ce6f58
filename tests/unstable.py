"""Lets a run of `.ci/run` go on past a failure of a ``realtime`` test, which is written down and tried again later.

Tests are of two kinds. A deterministic one has no clock, or a virtual one: its failure is a fault, always. One that is
marked ``realtime`` has real processes, sockets or clusters, and the machine's speed may fail it. Where the variable
UNSTABLE names a folder, such a failure is kept there, with its log, and does not fail pytest. When all parts have
run, ``.ci/again.py`` runs the test alone, three times, and judges.

There is no second chance for a deterministic test, for more than MOST tests of a run, for a test that was skipped
because something is not there, and for a test of which two lines of tests/unstable.jsonl are open: that file has each
test that was unstable once, with its cause and its mend.

tests/conftest.py registers the plugin.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

KNOWN = Path(__file__).with_suffix(".jsonl")
MOST = 3  # tests of one run that are tried again


def open_lines(lines: Iterable[str]) -> dict[str, int]:
    """How many lines of each test have no mend yet."""
    count: dict[str, int] = {}
    for line in lines:
        if line.strip() and (entry := json.loads(line))["mend"] is None:
            count[entry["test"]] = count.get(entry["test"], 0) + 1
    return count


def reason_for_red(test: str, is_realtime: bool, earlier: Collection[str], known: dict[str, int]) -> str | None:
    """Why a failure of ``test`` fails the run at once; None: it is tried again. ``earlier``: the tests of this run
    that are to be tried again already."""
    if not is_realtime:
        return "it is deterministic"
    if known.get(test, 0) >= 2:
        return f"two of its lines in tests/{KNOWN.name} have no mend"
    if test not in earlier and len(earlier) >= MOST:
        return f"{MOST} others are to be tried again already"
    return None


class SecondChances:
    """The plugin. ``folder`` gets ``failed.jsonl`` and each test's log, over all runs of pytest of one `.ci/run`."""

    def __init__(self, folder: Path, known: dict[str, int]) -> None:
        self._folder, self._known = folder, known
        self._is_red = False
        self._excused = 0
        self._told: list[str] = []

    @property
    def _failed(self) -> Path:
        return self._folder / "failed.jsonl"

    def _earlier(self) -> list[str]:
        lines = self._failed.read_text().splitlines() if self._failed.exists() else []
        return [json.loads(line)["test"] for line in lines]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
            return
        earlier = self._earlier()
        is_realtime = "realtime" in report.keywords and not hasattr(report, "lacks_something")
        why = reason_for_red(report.nodeid, is_realtime, earlier, self._known)
        if why is not None:
            self._is_red = True
            self._told.append(f"{report.nodeid} fails the run: {why}")
            return
        self._excused += 1
        load = os.getloadavg()[0]
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / (re.sub(r"[^A-Za-z0-9]+", "-", report.nodeid).strip("-")[-120:] + ".log")
        text = [f"{report.nodeid} ({report.when}), load {load:.1f}", report.longreprtext]
        text += [f"--- {title}\n{content}" for title, content in report.sections]
        with log.open("a") as file:
            file.write("\n".join(text) + "\n")
        if report.nodeid not in earlier:
            entry = {"test": report.nodeid, "load": round(load, 1), "log": str(log)}
            with self._failed.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        self._told.append(f"{report.nodeid} is tried again when all parts have run; {log}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self._excused and not self._is_red:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._told:
            terminalreporter.write_line(f"realtime: {line}")


def register_second_chances(config: pytest.Config) -> None:
    """Register the plugin where UNSTABLE names its folder."""
    if folder := os.environ.get("UNSTABLE"):
        known = open_lines(KNOWN.read_text().splitlines())
        config.pluginmanager.register(SecondChances(Path(folder).absolute(), known), "second-chances")
