"""Run what `.ci/run` has no time for, part by part; each part's outcome is a line of tests/nightly.jsonl.

    python tools/nightly.py                 the parts that have not passed on this code
    python tools/nightly.py --only 'e2e-*'  those of that name
    python tools/nightly.py --minutes 60    begin no part after an hour
    python tools/nightly.py --list          name them, with what is known of each

An interrupted run continues with the part that it was in. A part that has passed is run again when a file has
changed that it reads: the product without its pages, and the tests or benches that the part runs. Each part's output
is kept below build/nightly. The exit status is 1 if a part failed. docs/reliability.md shows the last line of each.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "tests" / "nightly.jsonl"
LOGS = ROOT / "build" / "nightly"
PYTHON = ".venv/bin/python"
QUICK_FORMS = (
    *("wire", "merge", "codec", "overlap", "encodings", "memory", "heterogeneous", "bandwidth"),
    *("quality", "ablations", "chaos", "goodput", "link_needs", "links", "broken_learners", "large", "hub"),
)
QUICK_WORDS = {
    "chaos": " examples/minimal.yaml --report build/nightly/chaos",
    "goodput": " --core --cache build/nightly/cells",
}
# The files of tests/e2e, by the cluster that they share. Those of the first group begin without the operator.
E2E = {
    "commands": ("test_before_install.py", "test_cli_api.py", "test_cli_pods.py", "test_chart.py"),
    "objects": ("test_crd_api.py", "test_objects_api.py", "test_common_ends.py", "test_images.py", "test_wrong.py"),
    "jobs": ("test_complete.py", "test_lifecycle.py", "test_security.py", "test_syncer_pod.py", "test_upgrade.py"),
    "losses": ("test_deletions.py", "test_groups.py", "test_nodes.py", "test_replacement.py", "test_shard_pods.py"),
    "chaos": ("test_chaos.py", "test_durability.py"),
    "operators": ("test_cuts.py", "test_leadership.py", "test_operator_faults.py", "test_operator_shell.py"),
}
REGIONS = ("encodings", "groups", "links", "lost", "refusals", "shards", "spanning", "ways")
PRODUCT = r"(protocol|syncer|worker|operator|cli|examples|manifests|charts)/|Dockerfile|pyproject|requirements|setup"
HELPERS = r"tests/(\w+\.py|\w+_simulation/|buckets/|s3/)"
E2E_HELPERS = (
    r"tests/(conftest|floods|operator_world|parties|patience|repository|s3_service|status_documents|wrong_jobs)\.py"
)
UNIT, INTEGRATION, BENCHES = "tests/unit/", "tests/integration/", "bench/|\\.ci/check_bench"


@dataclass(frozen=True)
class Part:
    """One command, run by bash at the repository's root."""

    name: str
    command: str
    what: str
    reads: tuple[str, ...]  # patterns of the beginnings of paths


@dataclass(frozen=True)
class Outcome:
    """A line of the file. ``passed`` and ``failed`` count tests; of a command without tests they are 1 and 0, or
    0 and 1."""

    part: str
    commit: str
    code: str
    seconds: int
    passed: int
    failed: int

    @property
    def is_green(self) -> bool:
        return self.failed == 0 and self.passed > 0


def pytest_part(name: str, words: str, what: str, *reads: str) -> Part:
    return Part(name, f"{PYTHON} -m pytest -q --timeout 1500 {words}", what, (PRODUCT, HELPERS, *reads))


def quick_form(name: str) -> Part:
    """A bench's short form, of which the shape of what it prints is checked."""
    out, words = f"build/nightly/{name}.json", f"bench/{name}.py --quick{QUICK_WORDS.get(name, '')}"
    command = f"{PYTHON} {words} --json >{out} && {PYTHON} .ci/check_bench.py {out}"
    return Part(f"bench-{name}", command, f"`{words}`", (PRODUCT, BENCHES))


def cluster_part(name: str, folder: str, files: Sequence[str], what: str) -> Part:
    paths = [f"tests/e2e/{folder}{file}" for file in files]
    command, helpers = f"{PYTHON} -m pytest -q -s {' '.join(paths)}", rf"tests/e2e/({folder})?(?!test_)\w+\.py"
    return Part(name, command, f"{what}: {', '.join(files)}", (PRODUCT, E2E_HELPERS, helpers, *map(re.escape, paths)))


def list_parts() -> list[Part]:
    """All, in the order in which they are run. A group of files has a cluster of its own, and an interrupted run
    repeats one group."""
    alone = "-n 2 --dist worksteal"
    rest = r"tests/integration/(?!run/)"
    return [
        pytest_part(
            "slow-unit", f"{alone} -m 'slow and not e2e' tests/unit", "slow unit tests", UNIT, "tools/", BENCHES
        ),
        pytest_part("slow-run", f"{alone} -m slow tests/integration/run", "whole runs on one machine", INTEGRATION),
        pytest_part(
            "slow-rest", f"{alone} -m slow tests/integration --ignore tests/integration/run", "parts of runs", rest
        ),
        pytest_part(
            "properties",
            f"{alone} -m 'hypothesis and not slow' --hypothesis-profile=full tests/unit tests/integration",
            "properties with all of their examples",
            *(UNIT, INTEGRATION, BENCHES),
        ),
        Part("worlds", f"{PYTHON} tests/worlds.py --minutes 30", "half an hour of new seeds", (PRODUCT, HELPERS)),
        Part("site", "make site", "the site: links and anchors", ("mkdocs", "docs/", "tools/site")),
        *(quick_form(name) for name in QUICK_FORMS),
        Part(
            "buckets",
            f"make bucket-services && {PYTHON} -m pytest -q tests/integration/syncer/test_bucket_services.py",
            "gs://, az:// and a second S3",
            (PRODUCT, HELPERS, "tests/integration/syncer/test_bucket_services"),
        ),
        Part(
            *("mutants", f"{PYTHON} tools/mutants.py", "each change of the code on purpose is noticed"),
            reads=(PRODUCT, HELPERS, UNIT, INTEGRATION, "tests/mutants/(?!caught)", "tools/mutants"),
        ),
        Part("images", "make images", "images for the clusters", (PRODUCT, "tools/images")),
        *(cluster_part(f"e2e-{name}", "", files, "a real cluster") for name, files in E2E.items()),
        *(
            cluster_part(f"regions-{name}", "regions/", [f"test_{name}.py"], "one job over several clusters")
            for name in REGIONS
        ),
    ]


def count_tests(output: str) -> tuple[int, int] | None:
    """Passed and failed, by pytest's last summary; None: there is none."""
    summaries = re.findall(r"^(?:=+ )?((?:\d+ \w+,? ?)+) in [\d.]+s", output, re.MULTILINE)
    if not summaries:
        return None
    found = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", summaries[-1])}
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)


def judge(part: Part, status: int, output: str, seconds: float, commit: str, code: str) -> Outcome:
    """The line of a part that has ended. A status other than 0 is a failure, whatever tests say; a file none of
    whose tests is chosen (pytest's 5) is a pass."""
    counted = count_tests(output)
    passed, failed = counted or (0, 0)
    if status not in (0, 5):
        failed = max(failed, 1)
    elif status == 5 or counted is None:
        passed = max(passed, 1)
    return Outcome(part.name, commit, code, round(seconds), passed=passed, failed=failed)


def read_by(part: Part, path: str) -> bool:
    """Whether a change of a file can change the part's outcome. Lines that a run writes cannot, nor the page that
    shows them."""
    if path.startswith("docs/reliability") or path.endswith(".jsonl"):
        return False
    pages = part.name == "site"
    return any(re.match(pattern, path) for pattern in part.reads) and (pages or not path.endswith(".md"))


def digest_code(part: Part, listing: Iterable[str]) -> str:
    """Of those files of `git ls-files -s` that the part reads."""
    kept = [line for line in listing if read_by(part, line.partition("\t")[2])]
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()[:12]


def read_outcomes(lines: Iterable[str]) -> dict[str, Outcome]:
    """The last line of each part."""
    return {entry["part"]: Outcome(**entry) for entry in map(json.loads, filter(str.strip, lines))}


def find_due(parts: Sequence[Part], known: Mapping[str, Outcome], code: Mapping[str, str]) -> list[Part]:
    """Those that have not passed on the code that they read, by part."""
    return [
        part
        for part in parts
        if not ((last := known.get(part.name)) is not None and last.code == code[part.name] and last.is_green)
    ]


def table(parts: Sequence[Part], known: Mapping[str, Outcome]) -> str:
    """The last outcome of each part, as a table of docs/reliability.md."""
    rows = ["| part | what it runs | commit | minutes | passed | failed |", "|---|---|---|---|---|---|"]
    for part in parts:
        last = known.get(part.name)
        cells = ["not yet run", "", "", ""]
        if last is not None:
            cells = [f"`{last.commit}`", f"{last.seconds / 60:.1f}", str(last.passed), str(last.failed)]
        rows.append(" | ".join(("", f"`{part.name}`", part.what, *cells, "")).strip())
    return "\n".join(rows)


def last_table() -> str:
    """The table of docs/reliability.md."""
    return table(list_parts(), read_outcomes(LINES.read_text().splitlines()))


def run_part(part: Part) -> tuple[int, str]:
    """Its exit status and output, which is shown as it comes."""
    said: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CI": os.environ.get("CI", "true")}
    with (
        (LOGS / f"{part.name}.log").open("w") as log,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", part.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            log.write(line)
            print(line, end="", flush=True)
    return process.returncode, "".join(said)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def changed_code(parts: Sequence[Part]) -> list[str]:
    """Tracked files that parts read and that differ from the commit."""
    return [path for path in git("diff", "--name-only", "HEAD").splitlines() if any(read_by(p, path) for p in parts)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="GLOB", action="append", help="parts of that name; may be given again")
    parser.add_argument("--minutes", type=float, default=None, help="begin no part after so long")
    parser.add_argument("--list", action="store_true", help="name the parts, and run nothing")
    chosen = parser.parse_args(arguments)
    globs = chosen.only or ["*"]
    parts = [part for part in list_parts() if any(fnmatch.fnmatch(part.name, glob) for glob in globs)]
    if not parts:
        parser.error(f"no part is called {chosen.only!r}: --list names them")
    listing, commit = git("ls-files", "-s").splitlines(), git("rev-parse", "--short=8", "HEAD").strip()
    code = {part.name: digest_code(part, listing) for part in parts}
    known = read_outcomes(LINES.read_text().splitlines())
    due = find_due(parts, known, code)
    if chosen.list:
        for part in parts:
            word = "due" if part in due else f"passed on {known[part.name].commit}"
            print(f"{part.name:24} {word:20} {part.what}")
        return 0
    if changed := changed_code(parts):
        parser.error(f"commit first, as a line names its commit: {', '.join(changed[:5])}")
    LOGS.mkdir(parents=True, exist_ok=True)
    begun, red, left = time.monotonic(), [], list(due)
    while left and (chosen.minutes is None or time.monotonic() - begun < chosen.minutes * 60):
        part, start = left.pop(0), time.monotonic()
        print(f"\n=== {part.name}: {part.command}", flush=True)
        status, output = run_part(part)
        outcome = judge(part, status, output, time.monotonic() - start, commit=commit, code=code[part.name])
        with LINES.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        if not outcome.is_green:
            red.append(part.name)
        print(f"=== {part.name}: {outcome.passed} passed, {outcome.failed} failed, {outcome.seconds} s", flush=True)
    print(f"\n{len(due) - len(red) - len(left)} of {len(due)} parts passed, {len(left)} left; failed: {red or 'none'}")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
