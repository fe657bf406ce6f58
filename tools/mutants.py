"""Break the product code on purpose, a little at a time, and see whether a test fails each time.

    python tools/mutants.py                       run those that have no result of the code as it is
    python tools/mutants.py --only 'rounds-*'     those of that name
    python tools/mutants.py --list                name them, with what is known of each; nothing is run

A mutant is a line of ``tests/mutants/<package>.tsv``, five columns with a tab between them:

    name    file, below the package    text, once in the file    text to put there instead    tests

Tests are files, folders or test ids below ``tests/unit/<package>``, or paths that begin with ``tests/``, with spaces
between them: the quick ones that should fail. ``⏎`` in a text is a line's end. A mutant that no test can tell from
the code has ``equivalent: WHY`` in place of its tests; it is not run, but its text has to be there.

Each mutant is applied in a copy of the repository below ``build/mutants``, never in the repository. Its tests run
there until one fails, first the one that noticed this mutant in an earlier code; where all pass, the package's other
unit tests run too, and a mutant that all of them pass has survived. One that exceeds the time limit is caught: a test
that does not end fails. What is known is kept in ``build/mutants/results.jsonl``, for as long as the mutant, its file
and its tests (a survivor's: all of the package's unit tests) stay as they are, so a run that was interrupted goes on
where it was. Those that were caught are kept in ``tests/mutants/caught.tsv``, too, which is committed: a run on another
machine goes on there. Each run of tests is a fork of a process that has imported pytest, torch and the like, and none
of the product's packages.

The exit status is 1 if a mutant survived, 2 if one cannot be run, or the tests fail without any.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import fnmatch
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from structure import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
TABLES = Path("tests/mutants")
WORK = Path("build/mutants")
CAUGHT = TABLES / "caught.tsv"
FOLDERS = {folder: f"{folder}/{package}" for package, folder in PACKAGES.items()}
EQUIVALENT = "equivalent:"
LINE_END = "⏎"
KERNELS = f"{FOLDERS['protocol']}/arrays/"  # what kernels of other files call, too
# Seconds in which tests work or sleep; those in which they wait for a processor that others have do not count.
LIMIT = 180.0  # for a mutant's own tests
WIDE_LIMIT = 600.0  # for the package's other unit tests
AT_ONCE = 10  # files of tests that are run without a mutant before their passing is written down
FAILED = 1  # pytest's exit status where a test failed; above it none was run
# What the tests of all packages, and those of one, import that takes long and starts no thread.
IMPORTED = {
    "": (
        *("pytest", "hypothesis", "xdist.plugin", "pytest_asyncio.plugin", "pytest_timeout", "numpy", "pydantic"),
        *("yaml", "grpc.aio", "google.protobuf.message", "cryptography.x509", "xxhash", "prometheus_client"),
    ),
    "protocol": ("numba", "typer", "rich.console"),
    "syncer": ("numba", "safetensors.numpy"),
    "worker": ("numba", "torch", "safetensors.torch"),
    "operator": ("kubernetes.client", "urllib3"),
    "cli": ("typer", "rich.console", "kubernetes.client"),
}


@dataclass(frozen=True)
class Mutant:
    """A change of the code that a test has to notice. Paths are relative to the repository's root."""

    name: str
    package: str  # its folder
    path: str
    was: str
    becomes: str
    tests: tuple[str, ...]
    equivalent: str  # why no test can notice it, or empty

    def mutate(self, text: str) -> str:
        """The file's text with the mutant in it; ValueError if its text is not there exactly once."""
        if (count := text.count(self.was)) != 1:
            raise ValueError(
                f"{self.name}: its text stands {count} times in {self.path}, and has to stand there once. The code has "
                f"changed: give the mutant its new text in {TABLES}/{self.package}.tsv, or take its line out"
            )
        return text.replace(self.was, self.becomes)

    def diff(self, text: str) -> str:
        lines = (t.splitlines(keepends=True) for t in (text, self.mutate(text)))
        return "".join(difflib.unified_diff(*lines, self.path, f"{self.path} ({self.name})", n=1))


@dataclass(frozen=True)
class Result:
    """What became of a mutant. ``tests_digest`` is of its own tests, or, of a survivor, of the whole package's."""

    name: str
    caught: bool
    by: str  # the test that failed, or why there is none
    seconds: float
    digest: str  # of the mutant and the file that it changes
    tests_digest: str


def read_mutants(root: Path) -> list[Mutant]:
    """All mutants, by package; ValueError names a line that is wrong."""
    found: dict[str, Mutant] = {}
    for package, folder in FOLDERS.items():
        table = root / TABLES / f"{package}.tsv"
        lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            columns = line.split("\t")
            if len(columns) != 5 or columns[0] in found:
                raise ValueError(f"{table}:{number}: a line has five columns, and a name that no other line has")
            name, path, was, becomes, tests = columns
            why = tests.removeprefix(EQUIVALENT).strip() if tests.startswith(EQUIVALENT) else ""
            paths = [] if why else [t if t.startswith("tests/") else f"tests/unit/{package}/{t}" for t in tests.split()]
            was, becomes = (text.replace(LINE_END, "\n") for text in (was, becomes))
            found[name] = Mutant(
                name, package, f"{folder}/{path}", was, becomes=becomes, tests=tuple(paths), equivalent=why
            )
    return list(found.values())


def stale(root: Path, mutants: Iterable[Mutant]) -> Iterator[str]:
    """What is wrong with mutants whose text, file or tests are not there any more, or that leave no program."""
    texts: dict[str, str] = {}
    for mutant in mutants:
        path = root / mutant.path
        if mutant.path not in texts:
            texts[mutant.path] = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            changed = mutant.mutate(texts[mutant.path])
            if changed == texts[mutant.path]:
                yield f"{mutant.name}: it changes nothing"
            if path.suffix == ".py":
                ast.parse(changed)
        except SyntaxError as error:  # every test would fail, and show nothing
            yield f"{mutant.name}: {mutant.path} cannot be compiled with it (line {error.lineno}: {error.msg})"
        except ValueError as error:
            yield str(error)
        if not mutant.tests and not mutant.equivalent:
            yield f"{mutant.name}: it has neither tests nor '{EQUIVALENT} WHY'"
        for test in mutant.tests:
            file, *names = test.split("::")
            if not (root / file).exists() or any(n not in (root / file).read_text(encoding="utf-8") for n in names):
                yield f"{mutant.name}: there is no test {test}: name another one in {TABLES}/{mutant.package}.tsv"


# ---------------------------------------------------------------- what is known


def _digest(root: Path, paths: Iterable[str], *words: str) -> str:
    digest = hashlib.sha256(repr(words).encode())
    for path in sorted({Path(p.split("::")[0]) for p in paths}):
        files = sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
        for file in files:
            digest.update(str(file.relative_to(root)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def own_digest(root: Path, mutant: Mutant) -> str:
    return _digest(root, [mutant.path], mutant.was, mutant.becomes)


def tests_digest(root: Path, mutant: Mutant, caught: bool) -> str:
    return _digest(root, mutant.tests if caught else [f"tests/unit/{mutant.package}"], *mutant.tests)


def read_lines(root: Path) -> Iterator[Result]:
    """All results that were written down, of whatever code: those of other machines, then this one's, as they came."""
    path = root / CAUGHT
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        name, by, digest, tests = line.split("\t")
        yield Result(name, True, by, 0.0, digest=digest, tests_digest=tests)
    path = root / WORK / "results.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # the last line of a run that was killed
            yield Result(**json.loads(line))


def read_results(root: Path, mutants: Iterable[Mutant]) -> dict[str, Result]:
    """The results that still hold, by mutant."""
    by_name = {mutant.name: mutant for mutant in mutants}
    found: dict[str, Result] = {}
    for result in read_lines(root):
        if mutant := by_name.get(result.name):
            digests = (own_digest(root, mutant), tests_digest(root, mutant, result.caught))
            if digests == (result.digest, result.tests_digest):
                found[result.name] = result
    return found


def keep_caught(root: Path, mutants: Iterable[Mutant]) -> None:
    """Write the results that hold of mutants that were caught, by name, for the next machine."""
    results = read_results(root, mutants)
    kept = [r for _, r in sorted(results.items()) if r.caught]
    write_whole(root / CAUGHT, "".join(f"{r.name}\t{r.by}\t{r.digest}\t{r.tests_digest}\n" for r in kept))


def write_whole(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read_noticers(root: Path) -> dict[str, str]:
    """By mutant, the test that noticed it last, whatever the code was then, if it is still there."""
    found: dict[str, str] = {}
    for result in read_lines(root):
        file, _, name = result.by.partition("[")[0].partition("::")  # with all its parameters
        file = file if file.startswith("tests/") else f"tests/unit/{file}"
        if name and (root / file).is_file() and name in (root / file).read_text(encoding="utf-8"):
            found[result.name] = f"{file}::{name}"
    return found


# ---------------------------------------------------------------- running


class Tree:
    """A copy of the repository in which mutants are tried one after another."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.noticers = read_noticers(root)
        self.path = root / WORK / f"tree-{number}"
        self._kernels = root / WORK / f"kernels-{number}-{_digest(root, [KERNELS])}"  # compiled, also by earlier runs
        shutil.rmtree(self.path, ignore_errors=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        self._folders = [str(self.path / folder) for folder in PACKAGES.values()]

    def run(self, tests: Iterable[str], limit: float) -> tuple[int | None, str]:
        """pytest's exit status, None after ``limit`` seconds, and what it printed."""
        output = self.path / ".output"
        words = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not e2e", "--tb=no", "--timeout=0"]
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # no session: a new one would have the priority of a foreground program
            signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, also where both are ignored
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            self._run_pytest([*words, "--hypothesis-profile=unshrunk", *tests], output)
        start, status = time.monotonic(), None
        try:
            while status is None and time.monotonic() - start - _waited_seconds(pid) < limit:
                done, code = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                time.sleep(0 if done else 0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with all that the tests have started
            if status is None:
                os.waitpid(pid, 0)
        return status, output.read_text(encoding="utf-8", errors="replace")

    def _run_pytest(self, words: list[str], output: Path) -> NoReturn:
        """In the fork: as ``python -m pytest`` in the copy does."""
        status = 3
        try:
            os.chdir(self.path)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ |= {
                "PYTHONPATH": os.pathsep.join(self._folders),
                "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have its file's size and time
                "NUMBA_CACHE_DIR": str(self._kernels),
            }
            sys.dont_write_bytecode = True
            sys.path[0:1] = ["", *self._folders]
            del sys.modules["structure"]
            import pytest

            status = int(pytest.main(words))
            for package in PACKAGES:
                found = getattr(sys.modules.get(package), "__file__", None) or str(self.path)
                if not found.startswith(str(self.path)):
                    print(f"{package} is imported from {found}, and not from the copy")
                    status = 3
            sys.stdout.flush()
        finally:
            os._exit(status)

    def try_mutant(self, mutant: Mutant, own: bool) -> Result:
        """Run its tests with the mutant in place, and, but for ``own``, the package's where these pass;
        RuntimeError if they cannot be run."""
        start = time.monotonic()
        original = (self.root / mutant.path).read_text(encoding="utf-8")
        (self.path / mutant.path).write_text(mutant.mutate(original), encoding="utf-8")
        self._forget_kernels(mutant.path, original)
        try:
            noticer = self.noticers.get(mutant.name)
            status, output = self.run([noticer], LIMIT) if noticer else (0, "")
            if status not in (FAILED, None):
                status, output = self.run(mutant.tests, LIMIT)
            if status == 0 and not own:
                status, output = self.run([f"tests/unit/{mutant.package}"], WIDE_LIMIT)
        finally:
            (self.path / mutant.path).write_text(original, encoding="utf-8")
            self._forget_kernels(mutant.path, original)
        if status is not None and status > FAILED:
            raise RuntimeError(f"{mutant.name}: its tests cannot be run:\n{output[-2000:]}")
        caught = status != 0
        by = "no test" if not caught else "the time limit" if status is None else _failed_test(output)
        seconds = round(time.monotonic() - start, 1)
        digests = own_digest(self.root, mutant), tests_digest(self.root, mutant, caught)
        return Result(mutant.name, caught, by, seconds, *digests)

    def _forget_kernels(self, path: str, text: str) -> None:
        """Numba compiles a changed file's kernels anew, but none of other files that have functions of it in them."""
        if path.startswith(KERNELS) and "kernel(" in text:
            shutil.rmtree(self._kernels, ignore_errors=True)


def _waited_seconds(pid: int) -> float:
    """How long a process could have run and had no processor, as Linux counts it; elsewhere 0."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _failed_test(output: str) -> str:
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1].removeprefix("tests/unit/")
    return "the end of Python"


def _check_tests(root: Path, tree: Tree, tests: list[str]) -> None:
    """Run the tests on the code as it is: RuntimeError if one fails. Those that have passed are not run again."""
    known = root / WORK / "passed.txt"
    passed = set(known.read_text(encoding="utf-8").split("\n")) if known.exists() else set()
    code = _digest(root, ["tests/conftest.py", *(folder for folder in FOLDERS.values() if (root / folder).exists())])
    keys = {f"{test} {code} {_digest(root, [test])}": test for test in tests}
    if missing := [test for key, test in keys.items() if key not in passed]:
        print(f"the tests without a mutant: {len(missing)} files", flush=True)
        for first in range(0, len(missing), AT_ONCE):
            some = missing[first : first + AT_ONCE]
            status, output = tree.run(some, WIDE_LIMIT)
            if status != 0:
                why = f"have no end within {WIDE_LIMIT:.0f} s" if status is None else "fail"
                raise RuntimeError(f"the tests {why} without any mutant: {' '.join(some)}\n{output[-2000:]}")
            passed |= {key for key, test in keys.items() if test in some}
            known.write_text("\n".join(sorted(passed)), encoding="utf-8")


def run_mutants(root: Path, mutants: list[Mutant], jobs: int = 1, own: bool = False) -> dict[str, Result]:
    """Try each; a result is printed and written down when it is there. ``own``: run no tests but the mutants' own; a
    mutant that these let pass has no result yet. RuntimeError if one cannot be run, or tests fail without any."""
    (root / WORK).mkdir(parents=True, exist_ok=True)
    for package in ("", *sorted({mutant.package for mutant in mutants})):
        for module in IMPORTED[package]:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    trees = [Tree(root, number) for number in range(min(jobs, len(mutants)))]
    _check_tests(root, trees[0], sorted({test for mutant in mutants for test in mutant.tests}))
    with tempfile.TemporaryFile("a+", encoding="utf-8") as results:
        forks = []
        for number, tree in enumerate(trees):
            if (pid := os.fork()) == 0:
                _work(tree, mutants[number :: len(trees)], own, results)
            forks.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in forks]
        results.seek(0)
        found = [Result(**json.loads(line)) for line in results]
    if any(statuses):
        raise RuntimeError("some mutants could not be run")
    return {result.name: result for result in found}


def _work(tree: Tree, mutants: list[Mutant], own: bool, results: TextIO) -> NoReturn:
    """In a fork: try one after another. One that cannot be run does not keep the others from it."""
    status = 1
    try:
        failures = 0
        with open(tree.root / WORK / "results.jsonl", "a", encoding="utf-8") as known:
            for mutant in mutants:
                try:
                    result = tree.try_mutant(mutant, own)
                except RuntimeError as error:
                    print(error, flush=True)
                    failures += 1
                    continue
                print(_words(result), flush=True)
                line = json.dumps(asdict(result)) + "\n"
                for file in (results, known) if result.caught or not own else (results,):
                    file.write(line)
                    file.flush()
        status = int(failures > 0)
    finally:
        os._exit(status)


def _words(result: Result) -> str:
    return f"{'caught' if result.caught else 'SURVIVED'} {result.name} by {result.by} in {result.seconds} s"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", action="append", help="names, with * and ?; may be repeated")
    parser.add_argument("--list", action="store_true", help="print what is known of each, and run nothing")
    parser.add_argument("--again", action="store_true", help="also those whose result still holds")
    parser.add_argument("--own", action="store_true", help="run only the tests that the table names")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once, each in a copy of its own (1)")
    args = parser.parse_args(argv)
    mutants = every = read_mutants(root)
    if args.only:
        mutants = [m for m in mutants if any(fnmatch.fnmatch(m.name, pattern) for pattern in args.only)]
    if troubles := list(stale(root, mutants)):
        print(*troubles, sep="\n")
        return 2
    equivalent = [m for m in mutants if m.equivalent]
    mutants = [m for m in mutants if not m.equivalent]
    results = {} if args.again else read_results(root, mutants)
    if args.list:
        for mutant in mutants:
            known = results.get(mutant.name)
            print(_words(known) if known else f"unknown {mutant.name}")
        print(*(f"equivalent {m.name}: {m.equivalent}" for m in equivalent), sep="\n")
        return 0
    if missing := [m for m in mutants if m.name not in results]:
        try:
            results |= run_mutants(root, missing, args.jobs, args.own)
        except RuntimeError as error:
            print(error)
            return 2
        finally:
            keep_caught(root, every)
    survivors = [m for m in mutants if not results[m.name].caught]
    for mutant in survivors:
        print(f"\n{mutant.name} survived:\n{mutant.diff((root / mutant.path).read_text(encoding='utf-8'))}")
    late = sum(r.by == "the time limit" for r in results.values())
    print(
        f"{len(mutants) - len(survivors)} of {len(mutants)} caught"
        + (f" ({late} by the time limit)" if late else "")
        + (f"; {len(equivalent)} are equivalent" if equivalent else "")
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
