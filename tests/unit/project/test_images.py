"""The images without an engine: tools/images.sh where it cannot go on, and the Dockerfile as text."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from repository import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def images(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("ENGINE", "LOCALKUBE", "CLUSTER", "IMAGE_TAG")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [str(ROOT / "tools" / "images.sh"), *words],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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


def stages() -> dict[str, tuple[str, list[str]]]:
    """The Dockerfile's stages: name → what it begins from, and its instructions (continued lines joined)."""
    found: dict[str, tuple[str, list[str]]] = {}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if begun := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines: list[str] = []
            found[begun[2]] = (begun[1], lines)
        elif found and line and not line.startswith("#"):
            lines.append(line)
    return found


def made_of(name: str, known: dict[str, tuple[str, list[str]]]) -> set[str]:
    """The stages whose files an image may hold: those it begins from or copies from, and theirs."""
    if name not in known:
        return {name}
    base, lines = known[name]
    copied = [word[1] for line in lines if (word := re.match(r"COPY --from=(\S+) /(?!lists)", line))]
    return {name}.union(*(made_of(other, known) for other in (base, *copied)))


@pytest.mark.parametrize("role", ["operator", "syncer", "worker"])
def test_an_image_is_labelled_runs_as_nobody_and_holds_what_its_role_needs(role: str) -> None:
    known = stages()
    lines = known[role][1]
    (label,) = [line for line in lines if line.startswith("LABEL ")]
    for word in (f'title="diloco-{role}"', 'version="${VERSION}"', 'licenses="Apache-2.0"', "description="):
        assert f"org.opencontainers.image.{word}" in label
    # The last user, and after it no step that would need another.
    last = max(index for index, line in enumerate(lines) if line.startswith(("USER ", "RUN ", "COPY ")))
    assert lines[last] == "USER 65532:65532"
    assert f'ENTRYPOINT ["python", "-m", "diloco_{role}"]' in lines
    parts = made_of(role, known)
    assert ("torch-install" in parts) == (role == "worker"), parts
    for line in (line for _, body in known.values() for line in body if "pip install" in line):
        assert " -c /lists/lock " in line or "--no-index" in line, f"not pinned: {line}"
