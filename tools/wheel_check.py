"""Install the wheel in empty environments, one for each extra, and use it there as a new user would.

    python tools/wheel_check.py                         base, and every extra that a user names
    python tools/wheel_check.py --extra base --extra local

The wheel is built by tools/dist.py. Every environment is new, knows nothing of this checkout, and gets the versions
of requirements.lock; TORCH_INDEX names an index to take torch from, as for `make setup`. In each of them the
command's help, its version, the examples and a check of one are tried, and then what the extra is for
(wheel_tries.py): with `local` a small job is trained, reported and exported, and PEFT loads an exported adapter; with
`datasets` learners read a Parquet file and a folder that save_to_disk wrote. Each environment is removed after that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import dist
from wheel_place import LOCK, Place, project
from wheel_tries import TRIED, tour

ALSO = {"datasets": ("local",)}  # what an extra is tried together with: records are read by a learner
NOT_FOR_USERS = {"dev", "docs"}


def torch_of(chosen: tuple[str, ...]) -> list[str]:
    """torch, as the lock has it, where one of the extras asks for it."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    wanted = any(line.startswith("torch>") for extra in chosen for line in extras[extra])
    return [line for line in LOCK.read_text(encoding="utf-8").splitlines() if wanted and line.startswith("torch==")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", action="append", choices=sorted(TRIED), help="only these (default: all)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        sdist, wheel = dist.build(Path(name) / "dist", None, "main")
        print(f"built {sdist.name} and {wheel.name}", flush=True)
        for extra in arguments.extra or TRIED:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="wheel-check-", ignore_cleanup_errors=True) as empty:
                place = Place(Path(empty))
                chosen = () if extra == "base" else (extra, *ALSO.get(extra, ()))
                place.install_wheel(wheel, chosen, torch_of(chosen))
                tour(place)
                TRIED[extra](place)
            print(f"{extra:<12} ok, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
