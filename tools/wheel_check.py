"""Install the wheel in empty environments, one for each extra, and use it there as a new user would.

    python tools/wheel_check.py                         base, and every extra that a user names
    python tools/wheel_check.py --extra base --extra local

The wheel is built by tools/dist.py. Every environment is new, knows nothing of this checkout, and gets the versions
of requirements.lock; TORCH_INDEX names an index to take torch from, as for `make setup`. In each of them the
command's help, its version, the examples and a check of one are tried, and then what the extra is for: with `local`
a small job is trained, reported and exported. An environment is removed when it was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import dist

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
NOT_FOR_USERS = {"dev", "docs"}


class Place:
    """An empty environment and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self._environment = folder / "environment"
        venv.create(self._environment, with_pip=True)

    def program(self, name: str) -> str:
        return str(self._environment / "bin" / name)

    def run(self, *words: str, timeout: float = 300) -> str:
        """What a program of the environment prints. Raises SystemExit, with its last lines, where it fails."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DILOCO"))}
        program, *rest = words
        done = subprocess.run(
            [self.program(program), *rest],
            cwd=self.folder,
            env=clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-25:])
            raise SystemExit(f"wheel-check: {' '.join(words)} ended with {done.returncode}:\n{last}")
        return done.stdout

    def install(self, wheel: Path, extra: str | None, torch: Sequence[str]) -> None:
        pip = ("python", "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", str(LOCK))
        if torch and (index := os.environ.get("TORCH_INDEX")):
            self.run(*pip, "--index-url", index, "--no-deps", *torch, timeout=1800)
        self.run(*pip, f"{wheel}[{extra}]" if extra else str(wheel), timeout=1800)
        self.run("python", "-m", "pip", "--disable-pip-version-check", "check")


def expect(text: str, words: str) -> None:
    if words not in text:
        raise SystemExit(f"wheel-check: {words!r} was expected in:\n{text[-2000:]}")


# ---------------------------------------------------------------- what is tried


def tour(place: Place) -> None:
    """What needs no extra."""
    expect(place.run("diloco", "--help"), "A job is one YAML file")
    expect(place.run("diloco", "version"), project()["version"])
    place.run("diloco", "examples")
    expect(place.run("diloco", "validate", "examples/minimal.yaml"), "a valid job")
    expect(place.run("diloco", "validate", "examples/tiny-gpt.yaml"), "a valid job")
    expect(place.run("diloco", "simulate", "bandwidth", "--quick"), "data-parallel")


def try_syncer(place: Place) -> None:
    expect(place.run("python", "-m", "diloco_syncer", "--help"), "--store")


def try_worker(place: Place) -> None:
    words = "import diloco_worker, diloco_worker.training.trainer; print(diloco_worker.Learner.__name__)"
    expect(place.run("python", "-c", words), "Learner")


def try_operator(place: Place) -> None:
    expect(place.run("python", "-m", "diloco_operator", "--help"), "--watch-namespaces")


def try_kube(place: Place) -> None:
    place.run("python", "-c", "import diloco.cluster.client, diloco.cluster.commands, kubernetes")


def try_local(place: Place) -> None:
    """A job from its file to a model that transformers loads."""
    few = ("--set", "training.stop={steps: 30}", "--set", "training.batch={sequences: 2}")
    place.run("diloco", "run", "examples/minimal.yaml", "--workdir", "run", *few, timeout=500)
    report = json.loads((place.folder / "run" / "report.json").read_text(encoding="utf-8"))
    if report["outcome"] != "complete" or not report["merges"]:
        raise SystemExit(f"wheel-check: the job ended {report['outcome']} after {report['merges']} merges")
    expect(place.run("diloco", "report", "run"), "complete")
    place.run("diloco", "export", "run", "model")
    load = "from transformers import AutoModelForCausalLM as A; print(type(A.from_pretrained('model')).__name__)"
    expect(place.run("python", "-c", load), "LlamaForCausalLM")


def try_imports(*names: str) -> Callable[[Place], None]:
    def tried(place: Place) -> None:
        place.run("python", "-c", "import " + ", ".join(names))

    return tried


TRIED: dict[str, Callable[[Place], None]] = {
    "base": lambda place: None,
    "syncer": try_syncer,
    "worker": try_worker,
    "local": try_local,
    "operator": try_operator,
    "kube": try_kube,
    "datasets": try_imports("datasets"),
    "tensorboard": try_imports("tensorboard"),
    "report": try_imports("matplotlib", "diloco.reports.plots"),
}


def project() -> dict[str, object]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(document["project"])


def torch_of(extra: str) -> list[str]:
    """torch, as the lock has it, where the extra asks for it."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    wanted = any(line.startswith("torch>") for line in extras.get(extra, ()))
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
                place.install(wheel, None if extra == "base" else extra, torch_of(extra))
                tour(place)
                TRIED[extra](place)
            print(f"{extra:<12} ok, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
