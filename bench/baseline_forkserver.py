"""The fork server of ``bench/chaos.py``: the worker's own, whose children run the programs of baselines."""

from __future__ import annotations

import sys

from diloco_worker import forkserver


def run_program() -> int:
    """Run the program that the environment names."""
    from lab.baselines.programs import main

    return main()


if __name__ == "__main__":
    sys.exit(forkserver.main(run_program))
