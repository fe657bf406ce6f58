"""Programs that the benchmarks start: a syncer on a store of its own, the operator, and what ends them."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.wire.control_auth import make_key

START_SECONDS = 120.0  # the first start may compile kernels
STOP_SECONDS = 20.0


class ProgramFailed(Exception):
    """A program did not start, or ended; the message has the end of its log."""


class Syncer:
    """``python -m diloco_syncer`` in ``folder``, on ``cores`` (None: wherever it likes), with at most ``files`` open
    files (None: as many as this process may have), as after ``ulimit -n``. ``credentials``: their folder, None: plain
    text."""

    def __init__(
        self,
        folder: Path,
        job: DiLoCoJob,
        cores: Collection[int] | None = None,
        files: int | None = None,
        credentials: str | None = None,
    ) -> None:
        self.folder, self._files = folder, files
        self.job_file, self.addresses_file = folder / "job.json", folder / "addresses.json"
        self._log, self._cores, self._credentials = folder / "syncer.log", cores, credentials
        folder.mkdir(parents=True, exist_ok=True)
        self.job_file.write_text(job_to_json(job), encoding="utf-8")
        make_key(folder / "control.key")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            sys.executable,
            "-m",
            "diloco_syncer",
            "--job",
            str(self.job_file),
            "--store",
            str(self.folder / "store"),
            "--control-key-file",
            str(self.folder / "control.key"),
            "--address-file",
            str(self.addresses_file),
            *(["--credentials", self._credentials] if self._credentials else []),
        ]

        def begin() -> None:  # before the interpreter starts, so that every thread of it inherits the cores
            if self._cores is not None:
                os.sched_setaffinity(0, self._cores)
            if self._files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, self._files))

        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=None if self._cores is None and self._files is None else begin,
            )
        end = time.monotonic() + START_SECONDS
        while not self.addresses_file.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise ProgramFailed(f"the syncer does not serve:\n{self.log_end()}")
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port for learners."""
        return str(json.loads(self.addresses_file.read_text(encoding="utf-8"))["sync"])

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """The status document."""
        address = json.loads(self.addresses_file.read_text(encoding="utf-8"))["http"]
        with urllib.request.urlopen(f"http://{address}/status", timeout=10) as page:
            return dict(json.load(page))

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; twice does no harm."""
        stop(self._process)


class Operator:
    """``python -m diloco_operator`` with the rights of ``kubeconfig``, with its files in ``folder``."""

    def __init__(self, folder: Path, kubeconfig: str, namespace: str) -> None:
        self._log, self._kubeconfig, self._namespace = folder / "operator.log", kubeconfig, namespace
        make_key(folder / "root.key")
        self._key = folder / "root.key"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._http = f"127.0.0.1:{free.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life. Whether it serves is for ``ready`` to say."""
        command = [
            sys.executable,
            "-m",
            "diloco_operator",
            "--namespace",
            self._namespace,
            "--http",
            self._http,
            "--key-file",
            str(self._key),
            "--log-format",
            "text",
            "--syncer-image",
            "syncer:bench",
            "--worker-image",
            "worker:bench",
        ]
        with self._log.open("ab") as log:
            environment = {**os.environ, "KUBECONFIG": self._kubeconfig}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def page(self, path: str) -> str:
        """A page of it. Raises ProgramFailed if it has ended, OSError if it does not answer."""
        if self._process is None or self._process.poll() is not None:
            raise ProgramFailed(f"the operator has ended:\n{self.log_end()}")
        with urllib.request.urlopen(f"http://{self._http}{path}", timeout=10) as page:
            return str(page.read().decode())

    def ready(self) -> bool:
        """Whether it says that it is."""
        try:
            return bool(self.page("/readyz"))
        except OSError:
            return False

    @property
    def peak_bytes(self) -> int:
        """The most resident memory that this life has had."""
        return peak_bytes(self._running().pid)

    @property
    def cpu_seconds(self) -> float:
        """Of all its threads, in this life."""
        fields = Path(f"/proc/{self._running().pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; twice does no harm."""
        stop(self._process)


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process has had, as the kernel counts."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """SIGTERM, then SIGKILL; twice does no harm."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
