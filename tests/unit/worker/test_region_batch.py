"""``regions[].batch``: what a learner of a region reads in place of ``training.batch``."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.spec.training import BatchSpec
from diloco_worker.settings import WorkerSettings

TEXT = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {batch: {sequences: 8, accumulation: 2}}
  learners: {command: [x]}
  regions: [{name: fast, learners: 1}, {name: slow, learners: 1, batch: {sequences: 2}}]
"""


@pytest.mark.parametrize(
    ("role", "region", "batch"),
    [
        ("learner", "fast", (8, 2)),
        ("learner", "slow", (2, 1)),
        ("learner", "unknown", (8, 2)),
        ("evaluator", "slow", (8, 2)),
    ],
)
def test_a_learner_has_its_regions_batch(tmp_path: Path, role: str, region: str, batch: tuple[int, int]) -> None:
    job = parse_job(TEXT)
    (tmp_path / "job.json").write_text(job_to_json(job))
    environ = {
        "DILOCO_JOB_FILE": str(tmp_path / "job.json"),
        "DILOCO_SYNCER": "127.0.0.1:1",
        "DILOCO_REGION": region,
        "DILOCO_ROLE": role,
    }
    settings = WorkerSettings.from_environment(environ)
    assert settings.job.spec.training.batch == BatchSpec(sequences=batch[0], accumulation=batch[1])
    rest = {"batch": job.spec.training.batch}
    spec = settings.job.spec
    assert spec.model_copy(update={"training": spec.training.model_copy(update=rest)}) == job.spec
