"""Programs that the benchmarks start: a syncer on a store of its own, and what ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco_protocol.credentials import make_key
from diloco_protocol.load import job_to_json
from diloco_protocol.spec import DiLoCoJob

START_SECONDS = 120.0  # the first start may compile kernels
STOP_SECONDS = 20.0


class ProgramFailed(Exception):
    """A program did not start, or ended; the message has the end of its log."""


class Syncer:
    """``python -m diloco_syncer`` in ``folder``, on ``cores`` (None: wherever it likes)."""

    def __init__(self, folder: Path, job: DiLoCoJob, cores: Collection[int] | None = None) -> None:
        self.folder = folder
        self.job_file, self.addresses_file = folder / "job.json", folder / "addresses.json"
        self._log, self._cores = folder / "syncer.log", cores
        folder.mkdir(parents=True, exist_ok=True)
        self.job_file.write_text(job_to_json(job), encoding="utf-8")
        make_key(folder / "control.key")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            sys.executable, "-m", "diloco_syncer",
            "--job", str(self.job_file), "--store", str(self.folder / "store"),
            "--control-key-file", str(self.folder / "control.key"),
            "--address-file", str(self.addresses_file),
        ]  # fmt: skip
        cores = self._cores
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                # Before the interpreter starts, so that every thread of it inherits the cores.
                preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
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

    def status(self) -> dict[str, Any]:
        """The status document."""
        address = json.loads(self.addresses_file.read_text(encoding="utf-8"))["http"]
        with urllib.request.urlopen(f"http://{address}/status", timeout=10) as page:
            return dict(json.load(page))

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; twice does no harm."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
