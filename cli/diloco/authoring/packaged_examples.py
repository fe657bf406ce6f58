"""``diloco examples``: the example jobs, from the installed package or the checkout that this is."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from diloco.console import FAILED, CommandError, unwritable_text
from diloco_protocol.common.files import write_whole

_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = (_PACKAGE / "packaged_examples", _PACKAGE.parent.parent / "examples")
"""In a wheel (setup.py puts them there), and in a checkout."""


def example_files(names: Sequence[str]) -> dict[str, Path]:
    """The examples of these names (none: all), by the name of their file. Raises CommandError."""
    place = next((one for one in _PLACES if (one / "minimal.yaml").is_file()), None)
    if place is None:
        raise CommandError(
            "this installation has no examples: an image leaves them out, a wheel or a checkout has them", FAILED
        )
    known = {path.name: path for path in sorted(place.iterdir()) if path.is_file()}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise CommandError(f"there is no example {', '.join(wrong)}; there are {', '.join(known)}")
    return {name: known[name] for name in names or known}


def title_of(path: Path) -> str:
    """What an example is: the first sentence of its opening comment or docstring, shortened."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines()[:4]:
        text = line.strip('#" ')
        words += text.split()
        if not text or text.endswith((".", ":")):
            break
    return textwrap.shorten(" ".join(words).partition(". ")[0].rstrip(".:"), 90, placeholder=" …")


def write_examples(directory: Path, names: Sequence[str], force: bool) -> list[Path]:
    """Write the examples of these names (none: all) below ``directory``; what is there already with the same content
    stays. Returns the files, written or not. Raises CommandError, before anything is written."""
    targets = {directory / name: path.read_bytes() for name, path in example_files(names).items()}
    try:
        other = [path for path, content in targets.items() if os.path.lexists(path) and path.read_bytes() != content]
        if other and not force:
            raise CommandError(
                f"{', '.join(map(str, other))}: there already, with other content; --force overwrites, "
                "or name another directory"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for path, content in targets.items():
            if force or not path.exists():
                write_whole(path, content)
    except OSError as error:
        raise CommandError(unwritable_text(Path(error.filename or directory), error)) from error
    return list(targets)
