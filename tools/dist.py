"""Build the sdist and the wheel in dist/, with a README that a package index can show.

    python tools/dist.py                                          without a repository: its links become plain text
    python tools/dist.py --repository URL [--ref v0.1.0]          links lead to the files there, at that tag

The README's links are relative, as a repository wants them; a package index shows the README alone. So the files
that git knows are copied, README.md and ``[project.urls]`` of pyproject.toml are filled in the copy, and the copy is
built: first the sdist, then the wheel from the sdist, so that a wheel never holds what its sdist lacks. Needs
setuptools (`make setup` installs it) and no network.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```\n?", re.S | re.M)
BUILD_SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def for_an_index(readme: str, repository: str | None, ref: str) -> str:
    """The README with absolute links: ``repository``'s files at ``ref``; without a repository the words alone.

    Pictures without a repository are left out. Blocks of code stay as they are.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        if ":" in target or not target:
            return match.group()
        if repository is None:
            return "" if picture else words
        path = posixpath.normpath(target)
        kind = "raw" if picture else "tree" if (ROOT / path).is_dir() else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/{ref}/{path}{anchor})"

    parts, at = [], 0
    for code in FENCE.finditer(readme):
        parts += [LINK.sub(absolute, readme[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, LINK.sub(absolute, readme[at:])])


def with_urls(pyproject: str, repository: str, ref: str) -> str:
    """pyproject.toml with the repository's addresses in ``[project.urls]``."""
    base = repository.rstrip("/")
    lines = {
        "Repository": base,
        "Documentation": f"{base}/blob/{ref}/docs/README.md",
        "Changelog": f"{base}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }
    head = "[project.urls]\n"
    if head not in pyproject:
        raise SystemExit("dist: pyproject.toml has no [project.urls]")
    return pyproject.replace(head, head + "".join(f'{name} = "{url}"\n' for name, url in lines.items()), 1)


def copy_of_the_tree(place: Path) -> None:
    """The files that git knows (with changes that are not committed), copied to ``place``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    for name in sorted(filter(None, listed.decode().split("\0"))):
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place / name)


def build(out: Path, repository: str | None, ref: str) -> tuple[Path, Path]:
    """Build both into ``out``; their paths, the sdist's first. Raises CalledProcessError where a build fails."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        copy_of_the_tree(tree)
        readme, pyproject = tree / "README.md", tree / "pyproject.toml"
        readme.write_text(for_an_index(readme.read_text(encoding="utf-8"), repository, ref), encoding="utf-8")
        if repository is not None:
            pyproject.write_text(with_urls(pyproject.read_text(encoding="utf-8"), repository, ref), encoding="utf-8")
        made = subprocess.run(
            [sys.executable, "-c", BUILD_SDIST, str(out.resolve())],
            cwd=tree,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        sdist = out / made.split()[-1]
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(name) / "sdist", filter="data")
        (unpacked,) = (Path(name) / "sdist").iterdir()
        wheels = Path(name) / "wheels"
        pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--no-index", "-w", wheels, unpacked], check=True, timeout=300)
        (built,) = wheels.iterdir()
        return sdist, Path(shutil.copy(built, out))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", help="the repository's address, as https://HOST/OWNER/NAME")
    parser.add_argument("--ref", default="main", help="the tag or branch that links lead to (default: main)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to (default: dist)")
    arguments = parser.parse_args()
    for path in build(arguments.out, arguments.repository or None, arguments.ref):
        print(f"{path}  {path.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
