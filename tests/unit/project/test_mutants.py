"""The table of mutants fits the code, and tools/mutants.py tells those that are caught from those that survive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mutants

PRODUCT = "def least(values):\n    return min(values)\n\n\ndef most(values):\n    return max(values)\n"
TEST = "from diloco.numbers import least\n\n\ndef test_least():\n    assert least([2, 1]) == 1\n"
WIDE = "from diloco.numbers import most\n\n\ndef test_most():\n    assert most([2, 1]) == 2\n"
CONFTEST = "from hypothesis import settings\n\nsettings.register_profile('unshrunk')\n"
TABLE = """# what a line is: tools/mutants.py
least\tnumbers.py\tmin(values)\tmax(values)\ttest_least.py
most\tnumbers.py\tmax(values)\tmin(values)\ttest_least.py
same\tnumbers.py\tdef least(values):⏎    return\tdef least(values):⏎    values = list(values)⏎    return\ttest_least.py
alike\tnumbers.py\tdef most(values)\tdef most(values, *_)\tequivalent: nobody gives it more
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one module, three mutants of it and a test that catches the first."""
    files = {
        "cli/diloco/__init__.py": "",
        "cli/diloco/numbers.py": PRODUCT,
        f"{mutants.KERNELS}__init__.py": "",
        "tests/conftest.py": CONFTEST,
        "tests/unit/cli/test_least.py": TEST,
        "tests/unit/cli/test_most.py": WIDE,
        "tests/mutants/cli.tsv": TABLE,
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'e2e']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def say(project: Path, *words: str, limit: float = mutants.LIMIT) -> tuple[int, str]:
    """The program's exit status and output. It forks, which a process with threads had better not."""
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'tools')!r}); import mutants; "
        f"mutants.IMPORTED, mutants.LIMIT = {{'': ('pytest',), 'cli': ()}}, {limit}; "
        f"sys.exit(mutants.main(sys.argv[1:], pathlib.Path({str(project)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.promise(
    "Each change of `tests/mutants` fits the code, and `make mutants` names those that no test notices"
)
def test_every_mutant_fits_the_code() -> None:
    table = mutants.read_mutants(ROOT)
    assert list(mutants.stale(ROOT, table)) == []
    assert len(table) >= 400


def test_a_line_that_fits_no_more_is_named_with_the_cure(project: Path) -> None:
    path = project / "cli/diloco/numbers.py"
    path.write_text(PRODUCT.replace("min(values)", "sorted(values)[0]"))
    (trouble,) = mutants.stale(project, mutants.read_mutants(project))
    assert trouble.startswith("least: its text stands 0 times in cli/diloco/numbers.py") and "cli.tsv" in trouble
    path.write_text(PRODUCT + "\n\nmin(values)\n")
    (trouble,) = mutants.stale(project, mutants.read_mutants(project))
    assert "2 times" in trouble
    path.write_text(PRODUCT)
    (project / "tests/unit/cli/test_least.py").unlink()
    troubles = list(mutants.stale(project, mutants.read_mutants(project)))
    assert len(troubles) == 3 and "no test tests/unit/cli/test_least.py" in troubles[0]
    (project / "tests/unit/cli/test_least.py").write_text(TEST)
    with open(project / "tests/mutants/cli.tsv", "a") as file:
        file.write("torn\tnumbers.py\treturn min(values)\t\ttest_most.py\n")
    (trouble,) = mutants.stale(project, mutants.read_mutants(project))
    assert trouble.startswith("torn: cli/diloco/numbers.py cannot be compiled with it (line ")
    with open(project / "tests/mutants/cli.tsv", "a") as file:
        file.write("least\tnumbers.py\ta\tb\ttest_most.py\n")
    with pytest.raises(ValueError, match=r"cli\.tsv:7: .* a name that no other line has"):
        mutants.read_mutants(project)


@pytest.mark.promise(
    "Each change of `tests/mutants` fits the code, and `make mutants` names those that no test notices"
)
@pytest.mark.slow
def test_what_is_caught_survives_and_is_known(project: Path) -> None:
    status, said = say(project)
    assert status == 1
    assert "caught least by cli/test_least.py::test_least" in said
    assert "caught most by cli/test_most.py::test_most" in said, "the package's other tests run too"
    assert "SURVIVED same by no test" in said and "+    values = list(values)" in said
    assert said.endswith("2 of 3 caught; 1 are equivalent\n")
    assert (project / "cli/diloco/numbers.py").read_text() == PRODUCT
    known = project / mutants.WORK / "results.jsonl"
    assert len(known.read_text().splitlines()) == 3
    with open(known, "a") as file:
        file.write('{"name": "least", "cau')  # the run was killed

    status, said = say(project)
    assert status == 1 and "caught least" not in said and said.endswith("2 of 3 caught; 1 are equivalent\n")
    status, said = say(project, "--list")
    assert status == 0 and "SURVIVED same" in said and "equivalent alike: nobody gives it more" in said
    assert say(project, "--only", "le*", "--only", "most")[1].endswith("2 of 2 caught\n")
    known.unlink()  # another machine knows those that were caught, by the committed file
    assert [line.split("\t")[:2] for line in (project / mutants.CAUGHT).read_text().splitlines()] == [
        ["least", "cli/test_least.py::test_least"],
        ["most", "cli/test_most.py::test_most"],
    ]
    status, said = say(project)
    assert status == 1 and "caught" not in said.removesuffix("2 of 3 caught; 1 are equivalent\n")
    # In a later code the test that noticed it is tried, though it is none of those that the table names.
    (project / "cli/diloco/numbers.py").write_text(PRODUCT + "\n")
    assert "caught most by cli/test_most.py::test_most" in say(project, "--own", "--only", "most")[1]


def test_a_result_holds_as_long_as_what_it_is_of(project: Path) -> None:
    def known() -> set[str]:
        return set(mutants.read_results(project, mutants.read_mutants(project)))

    table = {mutant.name: mutant for mutant in mutants.read_mutants(project)}
    (project / mutants.WORK).mkdir(parents=True)
    rows = []
    for name, caught in (("least", True), ("same", False)):
        own, tests = mutants.own_digest(project, table[name]), mutants.tests_digest(project, table[name], caught)
        rows.append(mutants.Result(name, caught, "it", 1.0, digest=own, tests_digest=tests))
    lines = [json.dumps(vars(row)) + "\n" for row in rows]
    (project / mutants.WORK / "results.jsonl").write_text("".join(lines))
    assert known() == {"least", "same"}
    (project / "tests/unit/cli/test_most.py").write_text(WIDE + "\n")  # one that the survivor has passed
    assert known() == {"least"}
    (project / "tests/unit/cli/test_least.py").write_text(TEST + "\n")
    assert known() == set()
    (project / "tests/unit/cli/test_least.py").write_text(TEST)
    assert known() == {"least"}
    (project / "cli/diloco/numbers.py").write_text(PRODUCT + "\n")
    assert known() == set()


def test_the_test_that_noticed_a_mutant_is_tried_first_in_a_later_code(project: Path) -> None:
    def noticers(*by: str) -> dict[str, str]:
        rows = [
            mutants.Result("least", True, one, 1.0, digest="of another code", tests_digest="likewise") for one in by
        ]
        (project / mutants.WORK).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(vars(row)) + "\n" for row in rows)
        (project / mutants.WORK / "results.jsonl").write_text(text + '{"name": "most", "cau')
        return mutants.read_noticers(project)

    there = "tests/unit/cli/test_least.py::test_least"
    assert noticers("cli/test_least.py::test_least[with a") == noticers(there) == {"least": there}
    assert noticers("cli/test_least.py::test_gone", "cli/test_gone.py::test_least", "the time limit") == {}


@pytest.mark.slow
def test_tests_that_do_not_end_or_fail_by_themselves(project: Path) -> None:
    with open(project / "tests/mutants/cli.tsv", "a") as file:
        file.write("broken\tnumbers.py\tmin(values)\t__import__('os')._exit(3)\ttest_least.py\n")
        file.write("endless\tnumbers.py\tmin(values)\t__import__('time').sleep(600)\ttest_least.py\n")
    status, said = say(project, "--only", "broken", "--only", "endless", limit=10.0)
    assert status == 2 and "broken: its tests cannot be run" in said
    assert "caught endless by the time limit" in said, "though one before it cannot be run"
    status, said = say(project, "--only", "endless")
    assert status == 0 and said.endswith("1 of 1 caught (1 by the time limit)\n")
    (project / "tests/unit/cli/test_least.py").write_text(TEST.replace("== 1", "== 3"))
    status, said = say(project, "--only", "least")
    assert status == 2 and "the tests fail without any mutant" in said
