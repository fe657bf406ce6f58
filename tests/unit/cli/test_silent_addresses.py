"""An address at which nothing answers is reported in one sentence by each command, with one exit code."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.main import app
from diloco_worker.settings import WorkerError
from diloco_worker.standalone.merged import load_merged
from free_ports import closed_port


@pytest.fixture
def closed() -> Iterator[str]:
    with closed_port() as port:
        yield f"127.0.0.1:{port}"


def diloco(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("words", [["status"], ["report"], ["learner", "join"], ["export"]])
def test_nothing_listens_there(words: list[str], closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diloco.machines.join.FETCH_SECONDS", 1.0)
    code, said = diloco(*words, closed, *(["out"] if words == ["export"] else []))
    assert code == 1 and f"nothing listens on {closed}; is the syncer up" in said
    assert "rrno" not in said and "UNAVAILABLE" not in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["status"], ["export"]])
def test_a_name_that_does_not_resolve(words: list[str], tmp_path: Path) -> None:
    code, said = diloco(*words, "nosuch.invalid:80", *([str(tmp_path / "out")] if words == ["export"] else []))
    assert code == 1 and "the host name nosuch.invalid does not resolve here" in said
    assert "rrno" not in said and "UNAVAILABLE" not in said


def test_a_program_that_loads_the_model_gets_the_same_sentence(closed: str) -> None:
    with pytest.raises(WorkerError, match=f"nothing listens on {closed}; is the syncer up"):
        load_merged(closed)


def test_what_answers_and_is_no_syncer_is_told_without_codes() -> None:
    """A server that closes each connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, said = diloco("status", address)
        server.shutdown(socket.SHUT_RDWR)
    assert code == 1 and f"no syncer answers on {address}" in said
    assert "rrno" not in said and "UNAVAILABLE" not in said
