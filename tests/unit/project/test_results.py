"""Commands in pages can be given; figures in docs/results/ have a command and a commit that there are."""

from __future__ import annotations

import functools
import re
import subprocess
from typing import Any

import pytest
import typer

from diloco import main
from repository import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
BEGINS = re.compile(r"(python |bench/|make |diloco )")  # a command of this repository
OPTION = re.compile(r"--[a-z][a-z-]*|-[A-Za-z]$")
OTHERS = ("protocol.md", "comparison.md")  # examples that look like commits; commits of other projects
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,8}\b")


@functools.cache
def contents(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def names_of_cluster_tests() -> str:
    files = (ROOT / "tests" / "e2e").rglob("test_*.py")
    return " ".join(name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")))


@functools.cache
def program() -> Any:
    return typer.main.get_command(main.app)


def commands_in(text: str) -> list[str]:
    """What stands in backticks and in blocks of code, cut where a shell would begin another command."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    lines = [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [command.strip() for given in (*spans, *lines) for command in re.split(r"&&|;|\|", given)]


def problem_of(command: str) -> str | None:
    """What of a command of this repository is not there; None where nothing is missing, and for other commands."""
    words = [
        word
        for raw in command.removeprefix("$ ").split()
        if (word := raw.strip("[]()…,'\"").removeprefix(".venv/bin/"))
    ]
    words = words[next((n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0) :]
    words = words[words[:1] == ["python"] :]
    for word in words:
        if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists():
            return f"{word} is not there"
    if words and re.fullmatch(r"bench/\w+\.py", words[0]):
        return problem_of_script(words[0], words[1:])
    if words[:1] == ["make"] and len(words) > 1:
        return problem_of_target(words[1], command)
    if words[:1] == ["diloco"]:
        return problem_of_subcommand(words[1:])
    return None


def problem_of_script(script: str, words: list[str]) -> str | None:
    if not (ROOT / script).exists():
        return f"{script} is not there"
    shared = ["bench/common.py"] + ["bench/trials/options.py"] * ("from trials.options import" in contents(script))
    known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', "".join(map(contents, [script, *shared]))))
    return next((f"{script} has no option {word}" for word in words if OPTION.match(word) and word not in known), None)


def problem_of_target(target: str, command: str) -> str | None:
    lines = re.findall(r"^([a-z][a-z0-9 -]*):", contents("Makefile"), re.M)
    if re.fullmatch(r"[a-z][a-z0-9-]*", target) and target not in " ".join(lines).split():
        return f"there is no target {target}"
    for name in re.findall(r"\b([A-Z][A-Z_0-9]+)=", command):
        if not re.search(rf"\b{name}\b", contents("Makefile") + contents("tools/images.sh")):
            return f"make knows no {name}"
    for expression in re.findall(r"E2E_ARGS=.*-k '?([\w ]+)", command):
        for word in re.findall(r"[a-z_]{4,}", expression):
            if word not in names_of_cluster_tests():
                return f"no test of tests/e2e has {word} in its name"
    return None


def problem_of_subcommand(words: list[str]) -> str | None:
    command, path = program(), "diloco"
    while hasattr(command, "commands"):
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            break  # a group's name alone, or its own options
        if words[0] not in command.commands:
            return f"{path} has no command {words[0]}"
        path, command, words = f"{path} {words[0]}", command.commands[words[0]], words[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [match[0] for word in words if (match := OPTION.match(word))]
    return next((f"{path} has no option {option}" for option in given if option not in known | {"--help", "-h"}), None)


def test_commands_in_pages_can_be_given() -> None:
    """Scripts, targets, variables, subcommands, options. In docs/results/ options alone vary the last command."""
    problems, before = [], ""
    for page in PAGES:
        for command in commands_in(page.read_text(encoding="utf-8")):
            varied = page in RESULTS and command.startswith("--") and before.startswith("diloco")
            problem = problem_of(f"{before.partition(' --')[0]} {command}" if varied else command)
            problems += [f"{page.name}: `{command}`: {problem}"] if problem else []
            before = command if BEGINS.match(command) else before
    assert problems == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python bench/wires.py --quick", "bench/wires.py is not there"),
        ("python bench/wire.py --quicker", "bench/wire.py has no option --quicker"),
        ("make quality TRIAL_ARGS=--quick", None),
        ("make qualities", "there is no target qualities"),
        ("make quality TRIALS=--quick", "make knows no TRIALS"),
        ("make e2e E2E_ARGS=\"-k 'pods_are_eaten and 10'\"", "no test of tests/e2e has pods_are_eaten in its name"),
        ("diloco plans job.yaml", "diloco has no command plans"),
        ("diloco certs issues", "diloco certs has no command issues"),
        ("diloco certs issue job.yaml --pkis pki/", "diloco certs issue has no option --pkis"),
        ("diloco apply JOB.yaml [--wait [--timeout 30m]]", None),
        ("$ diloco run job.yaml --workdirs runs", "diloco run has no option --workdirs"),
        ("diloco --version", None),
        ("diloco --versions", "diloco has no option --versions"),
        ("CI=1 .venv/bin/python -m pytest tests/e2e/test_nothing.py", "tests/e2e/test_nothing.py is not there"),
    ],
)
def test_what_cannot_be_given_is_found(command: str, problem: str | None) -> None:
    assert problem_of(command) == problem


def test_every_section_of_results_has_a_command_and_a_commit() -> None:
    texts = [page.read_text(encoding="utf-8") for page in RESULTS]
    sections = [section for text in texts for section in re.split(r"^## ", text, flags=re.M)[1:]]
    assert len(sections) > 12
    for section in sections:
        heading = section.partition("\n")[0]
        assert any(BEGINS.match(command) for command in commands_in(section)), f"{heading}: by which command?"
        assert COMMIT.search(section), f"{heading}: on which commit?"


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


def test_figures_in_links_to_results_stand_in_the_section_that_they_lead_to() -> None:
    """Or round to them: 0.8 s is 0.82 s there."""
    checked = 0
    for page in PAGES:
        links = re.findall(r"\[([^]]*)\]\(([^)#\s]*\bresults/\w+\.md)#([^)]+)\)", page.read_text(encoding="utf-8"))
        for words, target, anchor in links:
            text = contents(str((page.parent / target).resolve().relative_to(ROOT)))
            there = re.findall(r"\d+(?:\.\d+)?", section_at(text, anchor).replace(",", ""))
            for figure in re.findall(r"\d+(?:\.\d+)?", words.replace(",", "")):
                checked += 1
                known = (round(float(one), decimals(figure)) for one in there if decimals(one) >= decimals(figure))
                assert float(figure) in known, f"{page.name}: {figure} of {words!r} is not at {target}#{anchor}"
    assert checked > 15


def section_at(text: str, anchor: str) -> str:
    """What stands under the heading with this anchor."""
    for part in re.split(r"^#{2,3} (?=\S)", text, flags=re.M):
        if re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"there is no section {anchor}")


def test_commits_that_pages_name_are_in_the_history() -> None:
    """One that was rebased since is not."""
    pages = [page for page in PAGES if page.name not in OTHERS]
    named = {commit: page.name for page in pages for commit in COMMIT.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    if git("rev-parse", "--is-shallow-repository").strip() == "false":  # a shallow clone has no history
        history = git("rev-list", "HEAD").split()  # and not of a branch that only this machine has
        assert [name for name in named.items() if not any(commit.startswith(name[0]) for commit in history)] == []


def git(*words: str, given: str = "") -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=30, check=False).stdout
