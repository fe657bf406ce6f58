"""The project's version stands in pyproject.toml; this takes it to the files that cannot read it there.

python tools/version.py              print it
python tools/version.py --check      exit 1 if a file has another one
python tools/version.py 0.2.0        set it everywhere; then `make generate`
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"\d+\.\d+\.\d+"  # what PEP 440, SemVer (the chart) and an image's tag all take
PYPROJECT = ("pyproject.toml", rf'(?m)^(version = "){NUMBER}(?=")')
# Each file with what stands before the version in it.
FOLLOWERS = (
    ("charts/diloco/Chart.yaml", rf"(?m)^(version: ){NUMBER}$"),
    ("charts/diloco/Chart.yaml", rf"(?m)^(appVersion: ){NUMBER}$"),
    ("examples/custom-loop.Dockerfile", rf"(diloco-custom-loop:){NUMBER}"),
    ("examples/custom-loop.Dockerfile", rf"(ARG WORKER=diloco-worker:){NUMBER}"),
    ("tools/cluster_examples.py", rf"(image: diloco-custom-loop:){NUMBER}"),
)


def current(root: Path = ROOT) -> str:
    """The version of pyproject.toml."""
    name, pattern = PYPROJECT
    found = re.search(pattern, (root / name).read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f'version: {name} has no line that reads version = "1.2.3"')
    return found.group().partition('"')[2]


def differences(version: str, root: Path = ROOT) -> list[str]:
    """What does not have ``version``, a line for each."""
    found = []
    for name, pattern in FOLLOWERS:
        texts = [match.group() for match in re.finditer(pattern, (root / name).read_text(encoding="utf-8"))]
        if not texts:
            found.append(f"{name} has nothing like {pattern}")
        found += [f"{name} has {text!r}" for text in texts if not text.endswith(version)]
    return found


def set_version(version: str, root: Path = ROOT) -> None:
    """Write ``version`` into every file that has one. Raises SystemExit where it is none."""
    if not re.fullmatch(NUMBER, version):
        raise SystemExit(f"version: {version!r} is none; write 1.2.3")
    for name, pattern in (PYPROJECT, *FOLLOWERS):
        path = root / name
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(pattern, lambda match: match.group(1) + version, text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", help="the version to set")
    parser.add_argument("--check", action="store_true", help="exit 1 if a file has another one than pyproject.toml")
    arguments = parser.parse_args()
    if arguments.version:
        set_version(arguments.version)
    wrong = differences(current())
    for line in wrong:
        print(f"version: pyproject.toml has {current()}, {line}", file=sys.stderr)
    print(current())
    return 1 if wrong and (arguments.check or arguments.version) else 0


if __name__ == "__main__":
    sys.exit(main())
