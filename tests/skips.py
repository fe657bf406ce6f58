"""Which tests may be skipped where CI is set, and why; any other skip there is a failure.

A test that is skipped asserts nothing, and nobody reads of it. So a skip is either on this list, or CI
lacks something that it must be given. tests/conftest.py takes the two hooks at the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

# What the skip says (a regular expression that must match its beginning) -> why CI may go without it.
ALLOWED = {
    r"could not import 'datasets'": "`make setup` does not install this extra; `make wheel-check` reads files with it",
    r"could not import 'pyarrow'": "likewise: it comes with `datasets`",
    r"could not import 'peft'": "`make wheel-check` installs it and loads an exported adapter",
    r"mounting a tmpfs is not permitted here": "only root may mount; elsewhere full disks are not tried",
    r"this machine lets nobody make PID namespaces": "only root may, or who has user namespaces",
    r"root may write everything, and setpriv is not there": "file modes do not bind root",
    r"this machine has no IPv6": "some hosts of CI have none",
    r"no further buckets to test against": "their packages are large (make bucket-services)",
    r"could not import 'torchtitan'": "it wants triton and much more; docs/many-gpus.md says where the test ran",
    r"torch finds no CUDA device": "GPUs are checked by hand (docs/gpu-checklist.md)",
    r"there is one CUDA device only": "likewise",
}
# The same, where CLUSTER is given: what that kind of cluster cannot do. localkube can do all of it.
ALLOWED_ON_CLUSTER = {
    "kind": {r"Kind cannot ", r"this cluster's API server cannot be stopped"},
    "current": {
        r"Current cannot ",
        r"this cluster's API server cannot be stopped",
        r"a cluster of the tests' own is needed",
        r"several clusters are needed",
        r"the CRD of a cluster that is not the tests' own is left",
    },
}


def objection(reason: str) -> str | None:
    """Why a test that was skipped for ``reason`` fails; None: it may be skipped, or CI is not set."""
    if not os.environ.get("CI"):
        return None
    reason = reason.removeprefix("Skipped: ")
    allowed = {*ALLOWED, *ALLOWED_ON_CLUSTER.get(os.environ.get("CLUSTER", ""), ())}
    if any(re.match(pattern, reason) for pattern in allowed):
        return None
    return f"CI is set, and this skip is not on the list of tests/skips.py: {reason}"


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if text := objection(reason):
        report.outcome, report.longrepr = "failed", text
        report.lacks_something = True  # so that no other try is made: tests/unstable.py


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report
