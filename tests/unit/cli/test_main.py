"""The command line: help, argument errors, exit codes, and what it does not load."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.console import CommandError
from diloco.local.run import check_listen
from diloco.main import app
from diloco.processes.workdir import WorkdirError, claim, locked
from diloco_protocol.spec.load import parse_job
from free_ports import closed_port, free_port
from repository import VERSION
from status_documents import job_report

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                     num_attention_heads: 2, num_key_value_heads: 2}}
    data: {source: text, paths: [python-stdlib], sequenceLength: 16}
    stop: {steps: 10}
  sync: {fragments: 2, every: 4}
  regions: [{learners: 2}]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", [[], ["run"], ["validate"], ["plan"], ["status"], ["export"]])
def test_help_teaches_with_examples(command: list[str]) -> None:
    code, output = diloco(*command, "--help")
    assert code == 0 and "Usage:" in output
    assert "diloco validate examples/tiny-gpt.yaml" in output or command
    if command:
        assert f"diloco {command[0]} " in output.split("Example")[1]


def test_the_exit_codes_stand_in_the_help() -> None:
    assert "0 job complete, 1 job failed, 2" in diloco("--help")[1]


@pytest.mark.parametrize(
    "arguments",
    [["dance"], ["run"], ["run", "a", "b"], ["run", "a", "--what"], ["run", "a", "--seed", "x"], ["export", "a"]],
)
def test_wrong_arguments_are_2(arguments: list[str]) -> None:
    assert diloco(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chaos", "20s:explode:learner"], "write one of kill, term, pause, cut"),
        (["--chaos", "20s:kill:learner-2"], "the job has no learner-2; it has local-0, local-1"),
        (["--set", "sync.evry=12"], "every"),
        (["--set", "sync.every=-1"], "sync.every"),
        (["--set", "nonsense"], "path=value"),
        (["--seed", "-5"], "seed"),
        (["--set", "syncer.shards=65"], "syncer.shards = 65"),
        (["--http", "8080"], "host:port"),
        (["--http", "nowhere.invalid:0"], "there is no such host"),
        (["--http", "127.0.0.1:99999"], "host:port"),
    ],
)
def test_run_refuses_before_anything_is_started(job: Path, arguments: list[str], words: str) -> None:
    workdir = job.parent / "run"
    code, output = diloco("run", job, "--workdir", workdir, *arguments)
    assert code == 2 and words in output
    assert "Traceback" not in output
    assert not workdir.exists()


def test_job_files_that_are_none(tmp_path: Path) -> None:
    empty, big, broken = tmp_path / "empty.yaml", tmp_path / "big.yaml", tmp_path / "broken.yaml"
    empty.write_text("")
    broken.write_text("spec: [")
    with big.open("wb") as file:
        file.truncate(100 << 20)
    for path, words in [
        (empty, "it is empty"),
        (big, "too large"),
        (broken, "not YAML"),
        (tmp_path, "it is a directory"),
        (tmp_path / "absent.yaml", "there is no such file"),
    ]:
        for command in ("run", "validate"):
            code, output = diloco(command, path)
            assert code == 2 and words in output, output
            assert "Traceback" not in output


def test_a_port_in_use_is_refused_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CommandError, match=r"cannot listen there \(Address already in use\); choose another"):
            check_listen(taken)
    with pytest.raises(CommandError, match="choose an address of this machine"):
        check_listen("192.0.2.1:0")
    check_listen(f"127.0.0.1:{free_port()}")


# ------------------------------------------------------------------ workdir


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as first:
        assert first.store.is_dir()
        with (
            pytest.raises(WorkdirError, match=rf"in use by another run \(pid {os.getpid()}\)"),
            locked(tmp_path / "run"),
        ):
            pass
    with locked(tmp_path / "run"):
        pass


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, diloco.processes.workdir as w\n"
        "with w.locked(pathlib.Path(sys.argv[1])):\n print('locked', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    with child.stdout, child.stdin:
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(WorkdirError, match=f"pid {child.pid}"), locked(tmp_path / "run"):
            pass
        child.kill()
        child.wait()
    with locked(tmp_path / "run"):
        pass


def test_a_workdir_belongs_to_one_job(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        assert claim(workdir, parse_job(JOB), tmp_path) is False
        assert claim(workdir, parse_job(JOB, ["training.stop.steps=20"]), tmp_path) is True
        assert json.loads(workdir.job.read_text())["spec"]["training"]["stop"]["steps"] == 20
        assert workdir.job_directory() == tmp_path
        (workdir.store / "initial.json").write_text("{}")
        with pytest.raises(WorkdirError, match="belongs to the job 'tiny', this one is 'other'"):
            claim(workdir, parse_job(JOB.replace("name: tiny", "name: other")), tmp_path)
        with pytest.raises(WorkdirError, match=r"another seed, sync\.fragments: these are fixed"):
            claim(workdir, parse_job(JOB, ["seed=7", "sync.fragments=1"]), tmp_path)


def test_a_start_that_came_to_nothing_does_not_fix_what_was_wrong_with_it(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        assert claim(workdir, parse_job(JOB, ["seed=7"]), tmp_path) is False
        (workdir.store / "epochs").mkdir()
        for name in ("job.json", "epochs/0000000001"):
            (workdir.store / name).write_text("{}")
        assert claim(workdir, parse_job(JOB), tmp_path) is False
        assert json.loads(workdir.job.read_text())["spec"]["seed"] == 0
        assert not list(workdir.store.iterdir())


def test_only_a_store_with_a_version_is_gone_on_from(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        (workdir.store / "epochs").mkdir()
        assert not workdir.has_begun()
        (workdir.store / "initial.json").write_text("{}")
        assert workdir.has_begun()


def test_directories_that_cannot_be_a_workdir(tmp_path: Path, job: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert diloco("run", job, "--workdir", file) == (
        2,
        f"error: workdir {file} is not a directory: give another --workdir",
    )
    code, output = diloco("run", job, "--workdir", "/proc/nowhere")
    assert code == 2 and "the file system of /proc takes no new files; give another --workdir" in output
    assert "No such file" not in output
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.json").write_text("{}")
    code, output = diloco("run", job, "--workdir", other)
    assert code == 2 and "has a job.json that cannot be read" in output
    foreign = tmp_path / "foreign"
    (foreign / "store").mkdir(parents=True)
    (foreign / "store" / "initial.json").write_text("{}")
    code, output = diloco("run", job, "--workdir", foreign)
    assert code == 2 and "has a store but no job.json" in output


# ------------------------------------------------------------------ status, export


def test_status_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert diloco("status")[0] == 2 and "no run below ./runs" in diloco("status")[1]
    code, output = diloco("status", tmp_path)
    assert code == 2 and "no run's directory" in output and "host:port" in output
    with closed_port() as port:
        code, output = diloco("status", closed := f"127.0.0.1:{port}")
    assert code == 1 and f"nothing listens on {closed}; is the syncer up" in output and "Errno" not in output
    code, output = diloco("status", "nosuch.invalid:80")
    assert code == 1 and "the host name nosuch.invalid does not resolve here" in output and "rrno" not in output
    for command in (["status"], ["export", tmp_path / "out"]):
        code, output = diloco(command[0], "w" * 300, *command[1:])
        assert code == 2 and "no run's directory" in output
    code, output = diloco("status", "127.0.0.1:99999")
    assert code == 2 and "there is no port 99999" in output


@pytest.mark.promise(
    "The umask decides who may read the model at `output.uri`; a run that belongs to another user is reported as such",
    section="Hostile callers",
)
def test_the_run_of_another_user_is_said_to_be_so(tmp_path: Path) -> None:
    """Whether its directory is that user's alone, or only what is in it (a directory that was there before)."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    workdir.address.write_text("{}")
    workdir.report.write_text("{}")
    expected = {workdir.path: "another user's", workdir.report: "report.json cannot be read"}
    for private, words in expected.items():
        mode = private.stat().st_mode
        private.chmod(0)
        try:
            code, said = without_roots_rights("status", workdir.path)
        finally:
            private.chmod(mode)
        assert code == 2 and words in said, said


def without_roots_rights(*arguments: str | Path) -> tuple[int, str]:
    """The command as a user for whom modes hold, which they do not for root: in a thread without capabilities."""
    results: list[tuple[int, str]] = []

    def run() -> None:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
        assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0
        results.append(diloco(*arguments))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return results[0]


def test_status_of_a_run_that_is_over(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    code, output = diloco("status", workdir.path)
    assert code == 2 and "is not running and has left no report" in output
    workdir.report.write_text(job_report(outcome="complete", merges=12, final_loss=1.5).model_dump_json())
    code, output = diloco("status", workdir.path)
    assert code == 0 and "not running" in output and "complete" in output and "1.500 at the end" in output
    code, output = diloco("status", workdir.path, "--json")
    assert code == 0 and json.loads(output)["report"]["merges"] == 12


def test_export_of_nothing(tmp_path: Path) -> None:
    code, output = diloco("export", tmp_path, tmp_path / "out")
    assert code == 2 and "no run's directory" in output
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    code, output = diloco("export", workdir.path, tmp_path / "out")
    assert code == 2 and "holds no model yet" in output
    assert not (tmp_path / "out").exists()


def test_an_export_over_something_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output = diloco("export", tmp_path / "no-run", tmp_path / "file")
    assert code == 2 and f"{tmp_path / 'file'}: exists already: name a new directory, or remove it" in output


def test_version() -> None:
    assert diloco("version") == (0, VERSION)


# ------------------------------------------------------------------ imports


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "JOB", "--file-only"], ["status", "RUN"]])
def test_light_commands_load_nothing_heavy(arguments: list[str], job: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.report.write_text(job_report(outcome="complete").model_dump_json())
    words = {"JOB": str(job), "RUN": str(tmp_path / "run")}
    program = (
        "import sys\nfrom diloco.main import app\n"
        "try:\n    app()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "print('LOADED', ' '.join({m.partition('.')[0] for m in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *(words.get(a, a) for a in arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "diloco" in loaded and not loaded & {"torch", "numba", "grpc", "numpy", "transformers", "tensorboard"}
