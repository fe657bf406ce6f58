"""`make demo`, which is the first thing that people run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT


@pytest.mark.promise("`make demo` loses a learner, trains to its end, and exports the model that it scored")
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_the_demo_loses_a_learner_and_exports_the_model_that_it_scored(tmp_path: Path) -> None:
    subprocess.run(["make", "demo", f"DEMO_DIR={tmp_path / 'demo'}"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, ".ci/check_report.py", str(tmp_path / "demo")], cwd=ROOT, check=True)
