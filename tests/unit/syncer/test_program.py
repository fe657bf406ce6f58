"""How the syncer's program ends where it cannot begin."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.vocabulary import SyncerExit
from diloco_syncer.__main__ import main
from operator_world import job_object
from parties import Parties

JOB = job_object() | {"metadata": {"name": "job"}}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` sets a variable for its process, which is the tests' here."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


@pytest.mark.parametrize("fault", ["another job's", "no key", "no control key"])
def test_a_syncer_with_wrong_credentials_says_so_and_ends_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    parties = Parties(tmp_path / "pki", "other" if fault == "another job's" else "job")
    folder = parties.syncer()
    (tmp_path / "job.json").write_text(job_to_json(parse_job(json.dumps(JOB))))
    (tmp_path / "key").write_text("00" * 32 + "\n")
    if fault == "no key":
        (folder / "tls.key").write_bytes(b"hello")
    if fault == "no control key":
        (tmp_path / "key").write_text("short")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diloco_syncer.__main__._log", lambda *_: None)
    words = ["--job", "job.json", "--store", "store", "--control-key-file", "key"]
    assert main([*words, "--credentials", str(folder)]) == SyncerExit.CREDENTIALS
    said = {"another job's": "syncer of job 'job'", "no key": "and its key", "no control key": "16 bytes"}
    assert said[fault] in caplog.text


def test_a_port_in_use_is_no_matter_of_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job.json").write_text(job_to_json(parse_job(json.dumps(JOB))))
    (tmp_path / "key").write_text("00" * 32 + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diloco_syncer.__main__._log", lambda *_: None)
    folder = Parties(tmp_path / "pki", "job").syncer()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["--job", "job.json", "--store", "store", "--control-key-file", "key", "--listen", address]
        assert main([*words, "--credentials", str(folder)]) == 2
    assert "cannot listen" in caplog.text


WATCH = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            print("numpy with", os.environ.get("OPENBLAS_NUM_THREADS"))

sys.meta_path.insert(0, Watch())
from diloco_syncer.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2")])
def test_matrix_products_have_one_thread_unless_a_person_says_more(
    tmp_path: Path, given: dict[str, str], found: str
) -> None:
    """numpy's library reads the variable when it is loaded. The syncer's threads share out the matrices instead."""
    (tmp_path / "job.json").write_text(job_to_json(parse_job(json.dumps(JOB))))
    (tmp_path / "key").write_text("00" * 32 + "\n")
    (tmp_path / "file").write_text("no directory")
    words = ["--job", "job.json", "--store", "file", "--control-key-file", "key", "--threads", "3"]
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"} | given
    command = [sys.executable, "-c", WATCH, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"numpy with {found}"], done
