"""Kernels compiled into an image are read where nothing can be written, and left where they do not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from diloco_protocol.arrays.kernel_cache import BuiltCacheLocator
from repository import ROOT

CLASS = f"{BuiltCacheLocator.__module__}.{BuiltCacheLocator.__qualname__}"

KERNEL = """
    from diloco_protocol.arrays.kernels import F64_IN, kernel

    @kernel(F64_IN, returns="float64")
    def first(values):
        return values[0]{}
"""
PROGRAM = """
    import logging, sys
    logging.basicConfig(format="LOG %(message)s")
    import numpy as np, ours
    print("RESULT", ours.first(np.array([1.5])))
"""


def unprivileged() -> list[str]:
    """Words before a command that make it heed file modes, also where the tests run as root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everything, and setpriv is not there to take that right away")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]


class Image:
    """A folder of sources, and the cache that is made of them."""

    def __init__(self, root: Path) -> None:
        self.source, self.cache, self.home = root / "source", root / "cache", root / "home"
        for folder in (self.source, self.cache, self.home):
            folder.mkdir()
        self.write("")

    def write(self, addition: str) -> None:
        (self.source / "ours.py").write_text(textwrap.dedent(KERNEL.format(addition)))

    def run(self, *, sealed: bool, classes: str) -> str:
        """What the program and numba's cache said; ``sealed``: nothing of the image can be written."""
        for folder in (self.source, self.cache, *self.cache.rglob("*")):
            folder.chmod((0o755 if folder.is_dir() else 0o644) & ~(0o222 if sealed else 0))
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.home),
            "NUMBA_CACHE_DIR": str(self.cache),
            "NUMBA_CACHE_LOCATOR_CLASSES": classes,
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
            "NUMBA_DEBUG_CACHE": "1",
        }
        environment.pop("XDG_CACHE_HOME", None)
        done = subprocess.run(
            [*unprivileged(), sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,  # three workers that import and compile at once share the cores
            check=False,
        )
        for folder in (self.source, self.cache, *self.cache.rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)  # so that it can be taken away
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sealed_cache_is_read_and_one_of_other_sources_is_not_used(image: Image) -> None:
    assert "data saved" in image.run(sealed=False, classes=CLASS)
    said = image.run(sealed=True, classes=CLASS)
    assert "data loaded" in said and "saved" not in said
    assert "RESULT 1.5" in said
    image.write(" + 1.0")
    said = image.run(sealed=True, classes=CLASS)
    assert "data loaded" not in said and "LOG kernel first is compiled without a cache" in said
    assert "RESULT 2.5" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_class_numba_would_not(image: Image) -> None:
    """Why the class is there: with numba's own, the same sealed cache is passed over."""
    image.run(sealed=False, classes=CLASS)
    said = image.run(sealed=True, classes="UserProvidedCacheLocator")
    assert "data loaded" not in said and "RESULT 1.5" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_not_built_goes_to_the_next_locator(image: Image) -> None:
    """A user's own function in a derived image: cached in the user's folder, as ever."""
    classes = f"{CLASS},UserWideCacheLocator"
    said = image.run(sealed=True, classes=classes)
    assert "data saved" in said and "RESULT 1.5" in said
    assert list(image.home.rglob("*.nbc"))
    assert "data loaded" in image.run(sealed=True, classes=classes)


@pytest.mark.parametrize("file", ["Dockerfile", "Makefile"])
def test_an_image_and_make_setup_compile_every_kernel(file: str) -> None:
    """What is imported there before all is compiled are all modules that define kernels."""
    root = ROOT
    lines = (root / file).read_text().splitlines()
    line = " ".join(text for text in lines if "compile_all()" in text or text.startswith("KERNELS :="))
    imported = set(re.findall(r"diloco_\w+(?:\.\w+)+", line))
    defining = {
        ".".join(path.relative_to(root / folder).with_suffix("").parts)
        for folder in ("protocol", "syncer", "worker")
        for path in (root / folder).rglob("*.py")
        if re.search(r"^@kernel\(", path.read_text(), re.M)
    }
    assert len(defining) >= 3
    assert defining <= imported
