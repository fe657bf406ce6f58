"""An empty environment in which wheel_check.py installs the wheel, and the programs that run there."""

from __future__ import annotations

import os
import subprocess
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"


def project() -> dict[str, object]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(document["project"])


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

    def install(self, *requirements: str) -> None:
        """Install packages, in the versions of requirements.lock where it has them."""
        self._install(*requirements)
        self.run("python", "-m", "pip", "--disable-pip-version-check", "check")

    def install_wheel(self, wheel: Path, extras: Sequence[str], torch: Sequence[str]) -> None:
        """Install the wheel with ``extras``. ``torch``: first installed from TORCH_INDEX, where that is set."""
        if torch and (index := os.environ.get("TORCH_INDEX")):
            self._install("--index-url", index, "--no-deps", *torch)
        self.install(f"{wheel}[{','.join(extras)}]" if extras else str(wheel))

    def _install(self, *words: str) -> None:
        pip = ("python", "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", str(LOCK))
        self.run(*pip, *words, timeout=1800)


def expect(text: str, words: str) -> None:
    if words not in text:
        raise SystemExit(f"wheel-check: {words!r} was expected in:\n{text[-2000:]}")
