"""The worker program: ``python -m diloco_worker``, the built-in trainer or the evaluator by DILOCO_ROLE.

Exit codes (docs/design.md): 0 the job ended or this process drained, 1 failed, 2 the
configuration is wrong and a restart does not help, 4 refused for good by the syncer,
130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys

from diloco_protocol.load import JobError

from .settings import ConfigurationError, WorkerError, WorkerSettings

log = logging.getLogger("diloco_worker")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main() -> int:
    """Run the process's role to its end; returns its exit code. What a user did wrong is said in words,
    what we did wrong with a traceback."""
    try:
        _configure_logging()
        settings = WorkerSettings.from_environment()
        if settings.role == "evaluator":
            from . import evaluator

            return evaluator.evaluate(settings)
        from . import trainer

        return trainer.train(settings.job)
    except JobError as error:
        for problem in error.problems:
            log.error("%s", problem)
        return ConfigurationError.exit_code
    except WorkerError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.warning("interrupted")
        return 130
    except Exception:
        log.exception("failed")
        return WorkerError.exit_code


def _configure_logging() -> None:
    """To stderr, one line an event; level of DILOCO_LOG_LEVEL, other libraries from warnings on."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        force=True,
    )
    level = os.environ.get("DILOCO_LOG_LEVEL", "INFO").upper()
    if level not in _LEVELS:
        raise ConfigurationError(f"DILOCO_LOG_LEVEL is {level!r}: it must be one of {', '.join(_LEVELS)}")
    logging.getLogger("diloco_worker").setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
