"""Every file that is written from something else: the table below has each, with the function that makes it.

    python tools/generate.py --check [PATH ...]    exit 1, with the differences, if one is not current (`make lint`)
    python tools/generate.py --write [PATH ...]    write those that are not (`make generate`)

PATH chooses files, or all below a folder. A function receives the file's text as it is (empty: there is none) and
returns the text that it should have. It raises ``Problem`` if it cannot tell, and ``Skipped`` if a program is not
installed that it needs. ``--check`` also compares what is checked and not written: the version and the lock.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import chart
import cluster_examples
import command_pages
import contracts
import crd_schema
import helper_table
import hub_tables
import job_reference
import lock
import main_results
import metric_tables
import nightly
import operator_tables
import promises
import proto_stubs
import quality_words
import results_picture
import stacks
import time_limits
import trial_tables
import version

from diloco_protocol.common.files import PUBLIC, write_whole

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 40  # of a difference that is printed

Maker = Callable[[str], str]
Problem, Skipped = chart.Problem, chart.Skipped


def whole(make: Callable[[], str]) -> Maker:
    """A file that is generated from its first line to its last."""
    return lambda there: make()


def parts(make: Callable[[], Mapping[str, str]]) -> Maker:
    """A page of which some parts are generated, between marks that bear their names."""
    return lambda there: fill_page(there, make())


def fill_page(text: str, generated: Mapping[str, str]) -> str:
    """The page with these parts between its marks. Raises Problem if it lacks a part's marks."""
    for name, part in generated.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not found or not ended:
            raise Problem(f"the page lacks the marks of {name}")
        text = f"{head}{begin}\n\n{part}\n\n{end}{tail}"
    return text


FILES: dict[str, Maker] = {
    "docs/job.md": whole(job_reference.page),
    "docs/commands.md": whole(command_pages.page),
    "docs/architecture.md": parts(stacks.tables),
    "docs/contracts.md": parts(contracts.tables),
    "docs/monitoring.md": parts(metric_tables.tables),
    "docs/operator.md": parts(operator_tables.tables),
    "docs/reliability.md": parts(lambda: {**promises.tables(), "nightly": nightly.last_table()}),
    ".ci/run": promises.gate_head,
    "docs/time-limits.md": parts(time_limits.tables),
    "docs/results.md": parts(main_results.for_results),
    "docs/results/quality.md": parts(trial_tables.quality_tables),
    "docs/results/parts.md": parts(hub_tables.tables),
    "docs/results/ablations.md": parts(trial_tables.ablation_tables),
    "docs/faq.md": parts(lambda: {"quality by length": quality_words.by_length()}),
    "docs/choosing.md": parts(lambda: {"quality by settings": quality_words.by_settings()}),
    "README.md": parts(main_results.for_readme),
    "CONTRIBUTING.md": parts(helper_table.tables),
    "docs/pictures/goodput.svg": results_picture.picture,
    "charts/diloco/README.md": parts(chart.values_table),
    "charts/diloco/files/crd.yaml": whole(crd_schema.text),
    "manifests/crd.yaml": whole(crd_schema.text),
    **{f"manifests/examples/{name}.yaml": whole(make) for name, make in cluster_examples.EXAMPLES.items()},
    "manifests/install.yaml": whole(chart.install_manifest),
    **{f"protocol/diloco_protocol/wire/{name}": make for name, make in proto_stubs.STUBS.items()},
}
# What is only compared: what it is -> each difference; and the command that mends it.
CHECKS: dict[str, tuple[Callable[[], list[str]], str]] = {
    "version": (lambda: version.differences(version.current()), "make version VERSION=..."),
    "requirements.lock": (lock.problems, "make lock"),
}


def chosen(paths: Sequence[str]) -> Iterator[str]:
    """The files of the table that these paths name. Raises Problem for a path that names none."""
    for path in paths:
        if not any(name == path or name.startswith(f"{path.rstrip('/')}/") for name in FILES):
            raise Problem(f"nothing is generated at {path}")
    for name in FILES:
        if not paths or any(name == path or name.startswith(f"{path.rstrip('/')}/") for path in paths):
            yield name


def difference(name: str, there: str, wanted: str) -> str:
    """The lines that differ, at most MOST_LINES of them."""
    lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), name, "as generated", lineterm="", n=1)
    return "\n".join(line[:200] for line in list(lines)[:MOST_LINES])


def settle(name: str, *, write: bool) -> bool:
    """Compare one file with what it should be, and write it if asked to; whether it is current now."""
    path = ROOT / name
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        wanted = FILES[name](there)
    except Skipped as skipped:
        print(f"{name} was not compared: {skipped}")
        return True
    except (Problem, ValueError) as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        return False
    if wanted == there:
        return True
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else PUBLIC  # a program stays one
        write_whole(path, wanted.encode("utf-8"), mode=mode)
        print(f"{name} written")
        return True
    print(f"{difference(name, there, wanted)}\n{name} is not current: run make generate", file=sys.stderr)
    return False


def main(arguments: list[str] | None = None) -> int:
    """Check or write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/generate.py", description=(__doc__ or "").splitlines()[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--check", action="store_true", help="exit 1 if one is not current")
    how.add_argument("--write", action="store_true", help="write those that are not current")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="only these files, or those below these folders")
    given = parser.parse_args(arguments)
    try:
        current = [settle(name, write=given.write) for name in chosen(given.paths)]
    except Problem as problem:
        parser.error(str(problem))
    if given.check and not given.paths:
        for what, (problems, fix) in CHECKS.items():
            for problem in problems():
                print(f"{what}: {problem}: run {fix}", file=sys.stderr)
                current.append(False)
    return 0 if all(current) else 1


if __name__ == "__main__":
    sys.exit(main())
