"""``diloco init``, ``explain``, ``examples``, the version and the shell's completion."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.authoring.field_pages import find_field, page_text, walk
from diloco.authoring.job_template import SIZES, name_for
from diloco.console import CommandError
from diloco.main import app
from diloco_protocol.spec.load import load_job, parse_job
from patience import own_work, wait_for_end, wait_until
from repository import ROOT, VERSION

EXAMPLES = {path.name: path.read_bytes() for path in (ROOT / "examples").iterdir() if path.is_file()}


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------ version, completion


def test_the_version_by_an_option_and_by_a_word() -> None:
    assert diloco("--version") == diloco("-V") == diloco("version") == (0, f"{VERSION}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_fields(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell is the one that the program was started from, which a test need not have."""
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, shell))
    code, script = diloco("--show-completion")
    assert code == 0 and f"_DILOCO_COMPLETE=complete_{shell}" in script


def test_completion_in_a_shell() -> None:
    words = {"diloco ex": {"explain", "export", "examples"}, "diloco explain sync.ov": {"sync.overlap"}}
    for typed, expected in words.items():
        environ = {
            **os.environ,
            "_DILOCO_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(typed.count(" ")),
        }
        program = [sys.executable, "-c", "from diloco.main import app; app(prog_name='diloco')"]
        done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert expected <= set(done.stdout.split()), (typed, done)


# ------------------------------------------------------------------ init


@pytest.mark.parametrize("size", SIZES)
def test_a_new_job_of_each_size_is_valid_without_a_warning(size: str) -> None:
    code, said = diloco("init", "new.yaml", "--model", size)
    assert code == 0 and "warning" not in said and "diloco run new.yaml" in said
    code, said = diloco("validate", "new.yaml", "--file-only")  # how much memory this machine has is not asked
    assert code == 0 and "warning" not in said
    model = SIZES[size]
    nominal = {"tiny": 0.8e6, "10m": 10e6, "50m": 50e6, "125m": 125e6, "350m": 350e6, "1b": 1e9}[size]
    assert abs(model.parameters / nominal - 1) < 0.03
    job = load_job("new.yaml")
    assert job.metadata.name == "new" and job.spec.slots == 2 and job.spec.training.stop.steps == 300


def test_a_new_job_says_what_it_was_asked_for(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "corpus.txt").write_text("text")
    arguments = ["--data", "corpus.txt", "--tokenizer", "gpt2", "--learners", "5", "--steps", "20000", "--name", "mine"]
    code, said = diloco("init", "sub/job.yaml", *arguments)
    assert code == 0 and "warning" not in said and "5 learners, 20,000 steps each" in said
    job = load_job("sub/job.yaml")
    data = job.spec.training.data
    assert data is not None and data.paths == ["../corpus.txt"] and data.tokenizer == "gpt2"
    assert (job.metadata.name, job.spec.slots, job.spec.training.stop.steps) == ("mine", 5, 20000)
    assert job.spec.sync.every == job.spec.sync.fragments == 24


def test_a_new_job_for_a_program_of_ones_own(here: Path) -> None:
    code, said = diloco("init", "own.yaml", "--command", "python train.py --mode 'two words'")
    assert code == 0 and "there is no train.py" in said
    job = load_job("own.yaml")
    assert job.spec.learners.command == ["python", "train.py", "--mode", "two words"]
    assert job.spec.training.model is None and job.spec.training.data is None
    (here / "train.py").write_text("")
    assert "there is no" not in diloco("init", "own.yaml", "--command", "python train.py", "--force")[1]


def test_a_file_that_is_there_stays_unless_forced(here: Path) -> None:
    (here / "job.yaml").write_text("mine")
    code, said = diloco("init")
    assert code == 2 and "--force" in said and (here / "job.yaml").read_text() == "mine"
    assert diloco("init", "--force")[0] == 0 and "DiLoCoJob" in (here / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "7b"], "write one of tiny, 10m"),
        (["--command", "python t.py", "--model", "tiny"], "brings its own model and data"),
        (["--command", "python 't.py"], "No closing quotation"),
        (["--command", " "], "--command is empty"),
        (["--name", "My Job"], "metadata.name"),
        (["no/job.yaml"], "there is no directory no"),
        (["/proc/x.yaml"], "/proc/x.yaml cannot be written: the file system of /proc takes no new files"),
    ],
)
def test_wrong_wishes_are_2_and_write_nothing(here: Path, arguments: list[str], words: str) -> None:
    code, said = diloco("init", *arguments)
    assert code == 2 and words in " ".join(said.split()) and "Traceback" not in said
    assert not list(here.iterdir())


def test_the_file_on_stdout_is_the_file() -> None:
    code, text = diloco("init", "-", "--learners", "3")
    assert code == 0 and parse_job(text).spec.slots == 3 and not Path("-").exists()


def test_names_from_files() -> None:
    names = {"My Job_2.yaml": "my-job-2", "4gpus.yaml": "gpus", "a" * 40: "a" * 30, "é.yaml": "my-job"}
    assert {file: name_for(file) for file in names} == names


def test_on_a_terminal_without_options_it_asks(here: Path) -> None:
    """Answers on a real terminal: no own program, the size 10m, no data, three learners, the default steps."""
    master, slave = pty.openpty()
    program = [sys.executable, "-m", "diloco.main", "init", "asked.yaml"]
    with subprocess.Popen(program, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        os.write(master, b"\n10m\n\n3\n\n")
        shown = b""
        while b"Next:" not in shown:
            wait_until(lambda: select.select([master], [], [], 0.05)[0], f"more than {shown!r}", own_work)
            try:
                shown += os.read(master, 4096)
            except OSError:  # the other end is closed
                break
        assert wait_for_end(process) == 0, shown
    os.close(master)
    job = load_job("asked.yaml")
    assert b"Model size" in shown and job.spec.slots == 3
    assert job.spec.training.model is not None and job.spec.training.model.config["hidden_size"] == 320  # type: ignore[index]


# ------------------------------------------------------------------ explain


def test_a_field_is_explained() -> None:
    code, said = diloco("explain", "sync.every")
    assert code == 0 and said.startswith("spec.sync.every\n")
    for words in (
        "a whole number, at least 1 and",
        "default     24",
        "H: inner steps",
        "--set sync.every=24",
        "sync_every",
    ):
        assert words in said
    assert "sync.overlap is below it" in said  # the rule about it
    assert "once the job has started" in diloco("explain", "sync.fragments")[1]
    assert "once the job has started" not in said


def test_a_section_is_explained_by_its_fields() -> None:
    code, said = diloco("explain", "spec.training")
    assert code == 0
    for name in ("model", "data", "batch", "optimizer", "precision", "device", "stop", "evaluation"):
        assert re.search(rf"^ +{name}\b", said, re.M)
    assert "sequences" not in said and "sequences" in diloco("explain", "spec.training", "--recursive")[1]
    assert "metadata" in diloco("explain")[1]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("H", "spec.sync.every"),
        ("tau", "spec.sync.overlap"),
        ("quorum", "spec.sync.quorum"),
        ("learning_rate", "spec.training.optimizer.lr"),
        ("sync.lr", "spec.sync.outer.lr"),
        ("regions[].spares", "spec.regions.spares"),
        ("spec.regions.0.learners", "spec.regions.learners"),
        ("regions[0].maxLearners", "spec.regions.maxLearners"),
        ("metadata.labels", "metadata.labels"),
        ("sync.outer.learning_rate", "spec.sync.outer.lr"),
        ("sync.outer.beta", "spec.sync.outer.betas"),
        ("sync.outer.type", "spec.sync.outer.optimizer"),
        ("training.model.name", "spec.training.model.from"),
        ("training.optimizer.weight_decay", "spec.training.optimizer.weightDecay"),
        ("", ""),
    ],
)
def test_fields_are_found_by_the_names_that_people_have_for_them(name: str, path: str) -> None:
    assert find_field(name).name == path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sync.evry", "did you mean spec.sync.every?"),
        ("lr", "spec.training.optimizer.lr or spec.sync.outer.lr"),
        ("evry", "did you mean spec.sync.every?"),
        ("learners.podTemplate.spec", "spec.learners.podTemplate is a mapping"),
        ("sync.every.more", "spec.sync.every is a whole number"),
        ("zzz", "`diloco explain` shows the sections"),
    ],
)
def test_a_field_that_is_none_gets_a_suggestion(name: str, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        find_field(name)
    assert words in str(caught.value)
    code, said = diloco("explain", name)
    assert code == 2 and words in said


def test_every_field_has_a_page_that_says_what_it_takes() -> None:
    pages = list(walk())
    assert len(pages) > 100
    for page in pages:
        assert page.description and page.description in " ".join(page_text(page).split()), page.name
        assert find_field(page.name) == page
        json.dumps(page.default), json.dumps(page.example())


def test_the_overrides_that_pages_show_are_taken() -> None:
    base = (ROOT / "examples" / "minimal.yaml").read_text(encoding="utf-8")
    shown = 0
    for page in walk():
        found = re.search(r"--set (\S+=.*)", page_text(page, width=1000))
        if found and page.inner is None and page.required is False and page.example() == page.default:
            parse_job(base, [found[1]])  # a default by its own words is no change, whatever the rules
            shown += 1
    assert shown > 50


def test_explain_for_programs() -> None:
    document = json.loads(diloco("explain", "sync.grace", "--json")[1])
    assert document["path"] == "spec.sync.grace" and [one["path"] for one in document["fields"]] == [
        "spec.sync.grace.factor",
        "spec.sync.grace.capSeconds",
    ]
    assert json.loads(diloco("explain", "K", "--json")[1])["default"] == 1
    whole = json.loads(diloco("explain", "--json", "--recursive")[1])
    assert whole["fields"][3]["path"] == "spec" and len(whole["fields"][3]["fields"]) > 10


# ------------------------------------------------------------------ examples


def test_the_examples_are_written_and_no_other_file_is_overwritten(here: Path) -> None:
    code, said = diloco("examples")
    assert code == 0 and "Next: diloco run examples/minimal.yaml" in said
    assert {path.name: path.read_bytes() for path in (here / "examples").iterdir()} == EXAMPLES
    assert diloco("examples")[0] == 0
    (here / "examples" / "minimal.yaml").write_text("mine")
    code, said = diloco("examples")
    assert code == 2 and "minimal.yaml" in said and (here / "examples" / "minimal.yaml").read_text() == "mine"
    assert diloco("examples", "--force")[0] == 0
    assert (here / "examples" / "minimal.yaml").read_bytes() == EXAMPLES["minimal.yaml"]


def test_one_example_and_the_list(here: Path) -> None:
    assert diloco("examples", "minimal.yaml", "-o", "there")[0] == 0
    assert [path.name for path in (here / "there").iterdir()] == ["minimal.yaml"]
    code, said = diloco("examples", "--list")
    assert code == 0 and all(name in said for name in EXAMPLES) and "Byte plots" in said
    code, said = diloco("examples", "nothing.yaml")
    assert code == 2 and "there are byteplots.py" in said


def test_a_wheel_has_the_examples_that_its_help_names(here: Path) -> None:
    """What a wheel holds, as its build lays it out; nothing of the checkout is on the path."""
    built = here / "built"
    build = [sys.executable, str(ROOT / "setup.py"), "-q", "egg_info", "--egg-base", str(here)]
    done = subprocess.run(
        [*build, "build_py", "--build-lib", str(built)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    environ = {**os.environ, "PYTHONPATH": str(built)}
    program = [sys.executable, "-m", "diloco.main", "examples"]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (here / "examples").iterdir()} == EXAMPLES
    named = set(re.findall(r"examples/([\w.-]+\.yaml)", diloco("--help")[1] + diloco("run", "--help")[1]))
    assert named and named <= set(EXAMPLES)
