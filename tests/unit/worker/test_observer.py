"""What an observer says of the model that it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker import Observer
from diloco_worker.fragments import Vector
from diloco_worker.net.inbox import Downloaded
from diloco_worker.settings import WorkerSettings

JOB = {
    "apiVersion": "diloco.io/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "a"},
    "spec": {
        "learners": {"command": ["true"]},
        "regions": [{"learners": 1}],
        "sync": {"fragments": 1},
        "training": {"stop": {"steps": 1}},
    },
}


def version(epoch: int, number: int, tokens: int, progress: float) -> Announcement:
    return Announcement(
        0,
        epoch,
        number,
        Payload("float32", 40, 1),
        merged_sequence=0,
        merged_version=0,
        job_tokens=tokens,
        progress=progress,
    )


@pytest.mark.promise("An evaluator's scores count after the store lost data")
def test_a_syncer_whose_store_lost_something_is_told_no_tokens_that_it_cannot_know_of(tmp_path: Path) -> None:
    """The model goes back, and what is said of it too; within an epoch tokens only grow."""
    (tmp_path / "job.json").write_text(job_to_json(DiLoCoJob.model_validate(JOB)))
    environ = {"DILOCO_JOB_FILE": str(tmp_path / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    settings = WorkerSettings.from_environment({**environ, "DILOCO_ROLE": "evaluator"})
    observer = Observer(settings, torch.nn.Linear(4, 2))
    heard = [
        (version(1, 7, 700, 0.7), 700, 0.7),
        (version(1, 8, 650, 0.7), 700, 0.7),
        (version(2, 5, 500, 0.5), 500, 0.5),
        (version(2, 6, 600, 0.6), 600, 0.6),
    ]
    for announced, tokens, progress in heard:
        observer._inbox.put(announced)
        observer.poll()
        assert observer.announced_tokens == tokens
        observer._inbox.put(Downloaded(announced, Vector.from_array(np.zeros(10, np.float32))))
        assert observer.poll()
        assert (observer.job_tokens, observer.progress) == (tokens, progress)
        assert observer.sum_versions == announced.version
