"""``diloco run`` whose built-in learners make their steps at a pace (lab/pace.py): `paced_run.py run JOB …`.

Such a run is started with the command's words. Without any, this program is the fork server that the run starts: the
worker's own, whose children train at the pace.
"""

from __future__ import annotations

import functools
import sys

from diloco_worker import forkserver


def train_at_pace() -> int | None:
    """Be a worker, as ``python -m diloco_worker`` is, with the trainer at the pace."""
    from diloco_worker.__main__ import main
    from lab.pace import pace_trainer

    pace_trainer()
    return main()


def run() -> None:
    """Be the command ``diloco``, with this program as the fork server."""
    from diloco import main
    from diloco.local.runner import runner
    from diloco.processes.launch import ForkServerClient

    vars(runner)["ForkServerClient"] = functools.partial(ForkServerClient, program=(__file__,))
    main.main()


if __name__ == "__main__":
    if sys.argv[1:]:
        run()
    sys.exit(forkserver.main(train_at_pace))
