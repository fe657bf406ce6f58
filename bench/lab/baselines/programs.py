"""The programs of a baseline's processes, by ``BaselineSettings.program``. The fork server runs them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from diloco_protocol.spec.load import read_job
from diloco_worker import logs
from diloco_worker.settings import WorkerError
from lab.baselines.settings import VARIABLE, BaselineSettings

log = logging.getLogger(__name__)


def main() -> int:
    """Run the program to its end; returns its exit code, 1 where it failed: the log says why."""
    logs.configure()
    settings = BaselineSettings.from_json(os.environ[VARIABLE])
    logs.set_fields(learner=settings.learner)
    try:
        return _run(settings)
    except (RuntimeError, OSError, WorkerError) as error:  # a collective that broke off is an ordinary event here
        log.error("%s ends: %s: %s", settings.program, type(error).__name__, str(error).splitlines()[0])
        return 1


def _run(settings: BaselineSettings) -> int:
    from lab.baselines import ddp, elastic, score, torchft_diloco

    if settings.program == "lighthouse":
        return torchft_diloco.serve_lighthouse(settings)
    if settings.program == "store":
        return elastic.serve_store(settings)
    job = read_job(Path(os.environ["DILOCO_JOB_FILE"]))
    programs = {
        "rank": ddp.train_rank,
        "agent": elastic.run_agent,
        "replica": torchft_diloco.train_replica,
        "score": score.write_scores,
        "calibrate": score.calibrate,
    }
    return programs[settings.program](job, settings)
