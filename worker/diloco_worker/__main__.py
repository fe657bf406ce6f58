"""The worker program: ``python -m diloco_worker``, the built-in trainer or the evaluator by DILOCO_ROLE.

Exit codes: ``vocabulary.WorkerExit`` (docs/contracts.md), and 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys

from diloco_protocol.spec.load import JobError
from diloco_worker import exit_hooks, logs
from diloco_worker.settings import ConfigurationError, WorkerError, WorkerSettings
from diloco_worker.training.findings import VARIABLE as CHECK

log = logging.getLogger("diloco_worker")


def main() -> int:
    """Run the process's role to its end; returns its exit code. What a user did wrong is said in words,
    what we did wrong with a traceback; in either case the last line of the log says it."""
    try:
        logs.configure()
        if os.environ.get(CHECK):
            from diloco_worker.training.job_check import main as check

            return check()
        settings = WorkerSettings.from_environment()
        logs.set_fields(job=settings.job.metadata.name)
        return _run(settings)
    except JobError as error:
        for problem in error.problems:
            log.error("%s", problem)
        exit_hooks.write_termination_message("\n".join(map(str, error.problems)))
        return ConfigurationError.exit_code
    except WorkerError as error:
        log.error("%s", error)
        exit_hooks.write_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        log.warning("interrupted")
        return 130
    except Exception as error:
        log.exception("failed")
        log.error("failed: %s: %s", type(error).__name__, error)
        exit_hooks.write_error(error)
        return WorkerError.exit_code


def _run(settings: WorkerSettings) -> int:
    from diloco_worker.status_page import open_port

    if int(os.environ.get("RANK", "0")) > 0:  # a learner has one port, its first rank's
        settings = dataclasses.replace(settings, status=None)
    with contextlib.closing(open_port(settings)):  # before data and model, which may take long
        if settings.role == "evaluator":
            from diloco_worker.training import evaluator

            return evaluator.evaluate(settings)
        from diloco_worker.training import trainer

        return trainer.train(settings.job)


if __name__ == "__main__":
    # Taking the libraries down in good order takes seconds, for which a pod's successor would wait.
    ended = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
