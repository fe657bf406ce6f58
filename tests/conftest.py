"""Makes the modules that several kinds of tests share importable (pytest imports tests by file), says where Hypothesis
takes its examples from, and holds tests to the rules of skips.py, alone.py, realtime.py and unstable.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

sys.path.insert(0, str(Path(__file__).parent))

from alone import pytest_runtest_protocol
from realtime import pytest_collection_modifyitems
from s3_service import S3Service
from skips import pytest_make_collect_report, pytest_runtest_makereport
from unstable import register_second_chances

# What a script starts in the background ignores Ctrl-C, and so would the programs of which tests ask what it does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at once, many with processes of their own: threads that wait for each other only take time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    register_second_chances(config)


__all__ = [
    "pytest_collection_modifyitems",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
]

# A run's outcome depends on the code alone: examples follow from each test's source. Each quick run tries a third of
# them, .ci/run tries them all with the profile "full". To look for new ones: make test
# PYTEST_ARGS=--hypothesis-profile=fresh
# How long an example takes is the machine's business.
usual = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", usual, derandomize=True, max_examples=35)
settings.register_profile("full", usual, derandomize=True)
settings.register_profile("fresh", usual)
# That a mutant is caught is enough (tools/mutants.py): no smallest example is looked for.
settings.register_profile("unshrunk", usual, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """An S3 for all tests of this process, for it takes a second to start: each takes a bucket or folder of its own."""
    service = S3Service(tmp_path_factory.mktemp("s3"))
    try:
        service.make_bucket("bucket")
        yield service
    finally:
        service.stop()
