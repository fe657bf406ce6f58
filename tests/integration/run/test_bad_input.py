"""What a user can get wrong about a run, and a disk that fills up under one: one clear line, no traceback.

Job files that are none and wrong arguments are in tests/unit/cli/test_main.py and test_load.py.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import JOB, Run, check_ledger, diloco

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        point = tmp_path / f"disk-{len(mounted)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield make
    for point in mounted:
        subprocess.run(["umount", "-l", point], check=True, timeout=10)


def fill(disk: Path) -> Path:
    """Take all space that is left; returns the file that holds it."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def tracebacks(run: Run) -> list[str]:
    texts = {run.log.name: run.output}
    texts |= {log.name: log.read_text() for log in (run.workdir / "logs").glob("*.log")}
    return [name for name, text in texts.items() if "Traceback" in text]


@pytest.mark.slow
def test_data_shorter_than_one_batch(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a few words only\n" * 5)
    run = start()
    assert run.ends() == 2, run.everything()
    assert "2 sequences to train on are less than one batch of 4" in run.output, run.output
    assert "spec.training.data" in run.output and "lower the batch" in run.output
    assert not tracebacks(run), run.everything()


@pytest.mark.slow
def test_workdirs_that_cannot_be_written(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(steps=20, learners=1))
    (tmp_path / "file").write_text("")
    read_only, full = mount("ro,size=64k"), mount("size=64k")
    fill(full)
    for workdir, words in [
        (tmp_path / "file" / "below", "is not a directory"),
        (read_only / "run", "cannot be written: Read-only file system"),
        (full / "run", "No space left on device"),
        (full, "No space left on device"),
    ]:
        done = diloco("run", job, "--workdir", workdir, timeout=200)
        assert done.returncode == 2, (workdir, done)
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0], done
        assert str(workdir) in lines[0] and "--workdir" in lines[0], done


@pytest.mark.slow
def test_a_workdir_of_another_job(start: Callable[..., Run], tmp_path: Path) -> None:
    first = start(steps=100_000, learners=1)
    first.waits_for("first-merge")
    busy = diloco("run", tmp_path / "job.yaml", "--workdir", first.workdir)
    assert busy.returncode == 2 and f"in use by another run (pid {first.process.pid})" in busy.stderr
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == 130
    store = {path: path.read_bytes() for path in (first.workdir / "store").rglob("*") if path.is_file()}
    other = tmp_path / "other.yaml"
    for text, words in [
        (JOB.replace("name: tiny", "name: other"), "belongs to the job 'tiny', this one is 'other'"),
        (JOB.replace("hidden_size: 32", "hidden_size: 64"), "another training.model"),
    ]:
        other.write_text(text.format(steps=20, learners=1))
        done = diloco("run", other, "--workdir", first.workdir)
        assert done.returncode == 2 and words in done.stderr and "--workdir" in done.stderr, done
        assert len(done.stderr.strip().splitlines()) == 1, done
    after = {path: path.read_bytes() for path in (first.workdir / "store").rglob("*") if path.is_file()}
    assert after == store


@pytest.mark.promise("A run on a full disk says so, and continues without a restart once there is space")
@pytest.mark.slow
@pytest.mark.ci
def test_a_disk_that_fills_up_under_a_run(start: Callable[..., Run], mount: Callable[[str], Path]) -> None:
    disk = mount("size=16m")
    run = start(steps=900, workdir=disk / "run")
    run.waits_for("first-merge: local-1")
    filler = fill(disk)
    run.waits_for("disk full")
    status: dict[str, Any] = {}

    def is_told() -> bool:
        """Until the next try: what was being written when the disk became full may have left a page free."""
        status.update(run.live_status())
        return "disk full" in status["message"]

    run.until(is_told)
    assert status["phase"] == "training"
    merges = status["merges"]
    filler.unlink()
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["merges"] > merges + 4
    assert report["outcome"] == "complete" and report["syncer"]["restarts"] == 0
    assert all(learner["incarnations"] == 1 for learner in report["learners"])
    assert report["final_loss"] < report["initial_loss"] - 0.5
    check_ledger(report)
    assert not tracebacks(run), run.everything()


@pytest.mark.slow
def test_ctrl_c_on_a_full_disk(start: Callable[..., Run], mount: Callable[[str], Path]) -> None:
    disk = mount("size=16m")
    run = start(steps=100_000, workdir=disk / "run")
    run.waits_for("first-merge: local-1")
    run.waits_for("first-merge: local-0")
    filler = fill(disk)
    run.waits_for("disk full")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.everything()
    assert "disk full" in run.output or "No space left" in run.output
    assert not tracebacks(run), run.everything()
    filler.unlink()
    again = start("--set", "training.stop.steps=400", workdir=disk / "run")
    assert again.ends() == 0, again.everything()
    assert "continuing from the checkpoint" in again.output
    check_ledger(again.report())
