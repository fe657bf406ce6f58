"""tools/images.sh without an engine: names, and what it says where it cannot go on."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def images(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("ENGINE", "LOCALKUBE", "CLUSTER", "IMAGE_TAG")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [str(ROOT / "tools" / "images.sh"), *words],
        env={**inherited, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_images_are_called_after_role_and_version() -> None:
    roles = ("operator", "syncer", "worker")
    assert images("tags").stdout.split() == [f"diloco-{role}:{VERSION}" for role in roles]
    tagged = images("tags", IMAGE_TAG="dev").stdout.split()
    assert tagged == [f"diloco-{role}:dev" for role in roles]


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (("build", "syncre"), {"ENGINE": "podman"}, "no image 'syncre'; there are operator syncer worker"),
        (("build",), {"ENGINE": "buildkit"}, "ENGINE is docker, podman or localkube, not 'buildkit'"),
        (("build",), {"ENGINE": "localkube"}, "set LOCALKUBE"),
        (("load", "minikube:x"), {"ENGINE": "podman"}, "CLUSTER is kind:NAME or localkube:NAME"),
        (("load", "localkube:x"), {"ENGINE": "podman"}, "images that localkube built"),
        (("load",), {}, "load CLUSTER"),
        (("build-one", "."), {}, "build-one DIR TAG"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], environment: dict[str, str], said: str) -> None:
    # Without a localkube on PATH, which would be one to build with.
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(folder for folder in folders if not Path(folder, "localkube").exists())
    done = images(*words, **environment, PATH=path)
    assert done.returncode == 2
    assert said in done.stderr, done.stderr


def test_help_is_the_programs_head() -> None:
    done = images()
    assert done.returncode == 2
    assert "tools/images.sh build-one DIR TAG [DOCKERFILE]" in done.stdout
    assert "TORCH_INDEX" in done.stdout and "set -euo" not in done.stdout
