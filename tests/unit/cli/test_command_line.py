"""The command line has what people try first: a version, completion, a new job file, explanations, a check."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from diloco.main import app
from repository import VERSION
from status_documents import job_report

TOKENS = {"trained": 12_000, "merged": 12_000, "pending": 0, "dropped": 0}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


def diloco(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_version_by_the_usual_option() -> None:
    assert diloco("--version") == (0, f"{VERSION}\n")


def all_commands() -> Iterator[list[str]]:
    """The words of the program itself, of each group and of each command."""

    def below(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, each in getattr(command, "commands", {}).items():
            yield from below(each, [*words, name])

    yield from below(get_command(app), [])


def test_flags_say_no_type() -> None:
    found = list(all_commands())
    assert len(found) > 30 and ["certs", "show"] in found
    for words in found:
        code, said = diloco(*words, "--help")
        assert code == 0 and "--help" in said
        assert [line for line in said.splitlines() if "<bool>" in line] == [], words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["init", "--learners", "0"], "'--learners': must be a whole number of at least 1 and at most 4,096, not '0'"),
        (["init", "--steps", "two"], "'--steps': must be a whole number of at least 1, not 'two'"),
        (["run", "job.yaml", "--seed", "x"], "'--seed': must be a whole number, not 'x'"),
        (["plan", "job.yaml", "--step-seconds", "fast"], "'--step-seconds': must be a number, not 'fast'"),
        (["logs", "--tail", "1.5"], "'--tail': must be a whole number of at least 0, not '1.5'"),
    ],
)
def test_a_wrong_number_is_told_in_words(words: list[str], expected: str, here: Path) -> None:
    code, said = diloco(*words)
    assert code == 2 and expected in " ".join(re.sub("[│╭╮╰╯─]", " ", said).split()), said
    assert not list(here.iterdir())


def test_shells_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in diloco("--help")[1]
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "bash"))
    code, script = diloco("--show-completion")
    assert code == 0 and "_DILOCO_COMPLETE" in script


def test_a_new_job_file_is_valid_and_is_not_overwritten(here: Path) -> None:
    code, said = diloco("init", "job.yaml", "--learners", "3")
    assert code == 0 and "diloco run job.yaml" in said
    text = (here / "job.yaml").read_text()
    assert text.count("#") > 5, "it has comments"
    code, said = diloco("validate", "job.yaml", "--file-only")
    assert code == 0 and "a valid job" in said and "learners  3" in said
    code, said = diloco("init", "job.yaml")
    assert code == 2 and "--force" in said and (here / "job.yaml").read_text() == text


def test_a_field_is_explained() -> None:
    code, said = diloco("explain", "sync.every")
    assert code == 0 and said.startswith("spec.sync.every\n") and "--set sync.every=" in said
    assert diloco("explain", "H") == (code, said), "by the paper's letter too"
    code, said = diloco("explain", "sync.evry")
    assert code == 2 and "did you mean spec.sync.every?" in said


def test_files_that_the_help_names_come_with_the_program(here: Path) -> None:
    code, said = diloco("examples")
    assert code == 0, said
    named = set(re.findall(r"examples/[\w.-]+\.yaml", diloco("--help")[1] + diloco("run", "--help")[1]))
    assert named and all((here / name).is_file() for name in named)
    code, said = diloco("validate", sorted(named)[0], "--file-only")
    assert code == 0, said


def test_what_would_fail_here_is_found_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.doctor.machine.check_torch", lambda installed: (None, []))  # which takes seconds
    assert diloco("init", "job.yaml", "--data", "absent.txt")[0] == 0
    code, said = diloco("doctor", "job.yaml", "--json")
    found = json.loads(said)
    assert code == 1 and not found["ok"], said
    assert {one["section"] for one in found["findings"]} == {"machine", "packages", "cluster", "job"}
    (data,) = [one for one in found["findings"] if one["about"] == "data"]
    assert data["level"] == "error" and "absent.txt" in data["said"] and data["fix"]


def test_a_job_file_is_named_as_kubectl_names_it(here: Path) -> None:
    diloco("init", "job.yaml")
    assert diloco("validate", "-f", "job.yaml", "--file-only") == diloco("validate", "job.yaml", "--file-only")
    for words in (["run"], ["validate"], ["plan", "--step-seconds", "1"], ["chaos"], ["apply"], ["syncer", "serve"]):
        for named in ([], ["job.yaml", "-f", "job.yaml"]):
            code, said = diloco(*words, *named)
            assert code == 2 and "name one job file" in said and "-f JOB.yaml" in said, said


def test_thousands_have_commas() -> None:
    assert "1,000,000" in diloco("explain", "sync.staleness.maxVersions")[1]
    diloco("init", "job.yaml")
    assert (
        "until 12,345 steps" in diloco("validate", "job.yaml", "--file-only", "--set", "training.stop.steps=12345")[1]
    )


def test_runs_are_listed_the_newest_first(here: Path) -> None:
    assert "there is no run in runs" in diloco("list")[1]
    assert json.loads(diloco("list", "--json")[1]) == {"items": []}
    for number, name in enumerate(("first", "second")):
        run = here / "runs" / name
        run.mkdir(parents=True)
        (run / "job.json").write_text(json.dumps({"metadata": {"name": f"job-{name}"}}))
        report = job_report(outcome="complete", steps=1000 + number, final_loss=1.5, goodput=0.9, tokens=TOKENS)
        (run / "report.json").write_text(report.model_dump_json())
        for path in run.iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    (here / "runs" / "begun").mkdir()
    (here / "runs" / "begun" / "job.json").write_text("{")
    rows = json.loads(diloco("list", "--json")[1])["items"]
    assert [(row["job"], row["state"], row["running"]) for row in rows] == [
        ("begun", "unknown", False),
        ("job-second", "complete", False),
        ("job-first", "complete", False),
    ]
    assert rows[1]["step"] == 1001 and rows[1]["loss"] == 1.5 and rows[1]["workdir"] == "runs/second"
    said = diloco("list")[1].splitlines()
    assert said[0].split() == ["WORKDIR", "JOB", "STATE", "STEP", "TOKENS", "LOSS", "GOODPUT", "CHANGED"]
    assert said[2].split()[:5] == ["runs/second", "job-second", "complete", "1,001", "12,000"]


def test_what_a_program_asks_for_is_one_object(here: Path) -> None:
    def answer(*words: str) -> dict[str, Any]:
        code, said = diloco(*words, "--json")
        assert code == 0, said
        found = json.loads(said)
        assert isinstance(found, dict)
        return found

    assert answer("version") == {"version": VERSION}
    made = answer("init", "job.yaml", "--learners", "3", "--data", "absent.txt")
    assert (made["file"], made["job"], made["learners"]) == ("job.yaml", "job", 3)
    assert "absent.txt" in made["warnings"][0]
    assert "examples/minimal.yaml" in answer("examples")["written"]
    assert "minimal.yaml" in answer("examples", "--list")["examples"]
    assert answer("certs", "init") == {"authority": "pki/ca.crt", "key": "pki/ca.key"}
    issued = answer("certs", "issue", "-f", "job.yaml")["items"]
    assert [row["path"] for row in issued] == ["pki/default/job/syncer", "pki/default/job/learners"]
    assert issued[0]["names"] == ["diloco://job/default/job/syncer"] and issued[0]["days_left"] == 90
    renewed = answer("certs", "renew", "pki/default/job/syncer")["items"]
    assert [row["path"] for row in renewed] == ["pki/default/job/syncer"]
    assert answer("certs", "show", "pki/default/job/syncer")["items"] == renewed
    assert diloco("init", "-", "--json")[0] == 2


def test_a_job_file_after_f_wherever_one_is_read() -> None:
    """Only ``logs -f`` and ``explain`` mean something else: the first follows, as with kubectl."""
    for words in all_commands():
        said = diloco(*words, "--help")[1]
        if words and "JOB.yaml" in said.split("Options")[0].split("Arguments")[-1]:
            assert "--filename" in said, words
    code, said = diloco("learner", "join", "127.0.0.1:1", "job.yaml", "-f", "job.yaml")
    assert code == 2 and "name one job file" in said
    code, said = diloco("learner", "join", "127.0.0.1:1", "-f", "job.yaml")
    assert code == 2 and "there is no such file" in said
    code, said = diloco("certs", "issue", "-f", "job.yaml")
    assert code == 2 and "there is no such file" in said


def test_logs_for_programs_are_json_lines(here: Path) -> None:
    logs = here / "run" / "logs"
    logs.mkdir(parents=True)
    (here / "run" / "job.json").write_text("{}")
    (logs / "syncer.log").write_text(
        json.dumps({"time": "2026-01-02T03:04:05.678Z", "level": "info", "message": "serving"}) + "\n"
    )
    (logs / "local-0.log").write_text("2026-01-03 03:04:06,789 INFO mine: loss 1.25\nplain\n")
    code, said = diloco("logs", "run", "--json")
    assert code == 0
    rows = [json.loads(line) for line in said.splitlines()]
    assert rows[0] == {"process": "syncer", "time": "2026-01-02T03:04:05.678Z", "level": "info", "message": "serving"}
    assert rows[2] == {"process": "local-0", "message": "plain"}
    code, said = diloco("logs", "run", "--json", "--raw")
    assert code == 2 and "leave one of them out" in said
