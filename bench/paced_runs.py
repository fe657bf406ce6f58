"""One job of real processes with learners that keep a pace: what bench/heterogeneous.py compares.

`diloco run` where all learners are there from the beginning, `diloco syncer serve` and `diloco learner join` where some
come and go. Learners are bench/paced_learner.py. A result is kept by a digest of what makes it. While the job runs its
status is asked for, so that the scores of the merged model, which the report has by tokens, have their time too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from lab.sources import source_digest, training_digest

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "build" / "heterogeneous"
SEQUENCES = 8
LENGTH = 64
MOST_LATE = 0.05  # share of steps that may take longer than their pace
START_SECONDS = 120.0  # that a run may take beyond its own time
OVERHEAD = 12.0  # that it usually takes
SAY_EVERY = 10.0
ASK_EVERY = 0.25  # for the status
SCORES = 12  # of the merged model in a run


class RunFailed(Exception):
    """A run did not come to its end, or not at its pace; the message has what the programs said."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One job: ``regions`` of the job file, seconds of a step in each, the round's rules, and who comes when (as shares
    of the run, from and to)."""

    name: str
    regions: tuple[dict[str, Any], ...]
    paces: Mapping[str, float]
    seconds: float
    seed: int
    quorum: int = 1
    grace: float = 0.9
    visitors: tuple[tuple[float, float], ...] = ()

    @property
    def learners(self) -> int:
        return sum(region["learners"] for region in self.regions)

    @property
    def tokens(self) -> int:
        """What learners that keep their pace train in the run, visitors left out."""
        sequences = sum(
            region.get("batch", {}).get("sequences", SEQUENCES) * region["learners"] / self.paces[region["name"]]
            for region in self.regions
        )
        return int(sequences * self.seconds * LENGTH)

    def job(self) -> dict[str, Any]:
        training = {
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 176,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "max_position_embeddings": LENGTH,
                }
            },
            "data": {"paths": ["python-stdlib"], "tokenizer": "bytes", "sequenceLength": LENGTH},
            "batch": {"sequences": SEQUENCES},
            "optimizer": {"lr": 3e-3, "warmupSteps": 20, "schedule": "constant"},
            "stop": {"seconds": self.seconds},
            "evaluation": {"everyTokens": self.tokens // SCORES, "batches": 16},
        }
        sync = {
            "fragments": 4,
            "every": 8,
            "quorum": self.quorum,
            "grace": {"factor": self.grace, "capSeconds": 2},
            "heartbeat": {"timeoutSeconds": 5},
        }
        spec = {
            "seed": self.seed,
            "training": training,
            "sync": sync,
            "learners": {"command": ["python", str(HERE / "paced_learner.py")]},
            "regions": list(self.regions),
        }
        return {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "paced"}, "spec": spec}

    def digest(self) -> str:
        """Of what makes the run and reads it: the job, the paces, who comes when, these programs, and what trains."""
        code = [source_digest([HERE / "paced_learner.py", Path(__file__)]), training_digest()]
        text = json.dumps([self.job(), dict(self.paces), self.visitors, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a run. ``learners``: in a merge, the mean. ``share``: of the merged tokens, by region. ``joined``:
    seconds from a visitor's Join to its first merge; None: nobody came. ``curve``: seconds, trained tokens and loss of
    each score of the merged model."""

    goodput: float
    tokens: float  # merged, per second
    loss: float  # nats per token of the merged model at the end
    learners: float
    share: Mapping[str, float]
    curve: Sequence[Sequence[float]]
    joined: float | None = None


def cached(arm: Arm) -> bool:
    return (CACHE / f"{arm.digest()}.json").is_file()


def load(arm: Arm) -> Found:
    return Found(**json.loads((CACHE / f"{arm.digest()}.json").read_text(encoding="utf-8")))


def run(arm: Arm, quick: bool) -> None:
    """Run the job and cache what came of it. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        job = folder / "job.yaml"
        job.write_text(json.dumps(arm.job()), encoding="utf-8")  # JSON is YAML
        environ = {**os.environ, "BENCH_PACES": json.dumps(dict(arm.paces)), "OMP_NUM_THREADS": "1"}
        programs, watch = Programs(folder, environ), StatusWatch(folder / "run" / "address.json")
        try:
            joined = None
            if arm.visitors:
                joined = run_with_visitors(arm, programs, job, watch)
            else:
                run_alone(programs, job, arm)
        finally:
            watch.close()
            programs.close()
        report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
        check_pace(folder, quick)
    if report["outcome"] != "complete" or report["final_loss"] is None:
        raise RunFailed(f"{arm.name}: {report['outcome']}, {report.get('message')}")
    found = read_report(arm, report, watch, joined)
    CACHE.mkdir(parents=True, exist_ok=True)
    whole = CACHE / f"{arm.digest()}.json.new"
    whole.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")
    whole.replace(CACHE / f"{arm.digest()}.json")


def read_report(arm: Arm, report: Mapping[str, Any], watch: StatusWatch, joined: float | None) -> Found:
    places = [region["name"] for region in arm.regions for _ in range(region["learners"])]
    tokens = dict.fromkeys(places, 0)
    for row in report["learners"]:
        tokens[places[min(row["slot"], len(places) - 1)]] += row["tokens"]
    return Found(
        report["goodput"],
        report["tokens"]["merged"] / arm.seconds,
        report["final_loss"],
        report["learners_in_merges"] or 0.0,
        share={region: count / sum(tokens.values()) for region, count in tokens.items()},
        curve=[(watch.seconds_at(trained), trained, loss) for trained, loss in report["eval_loss"] if loss is not None],
        joined=joined,
    )


class StatusWatch:
    """Asks the syncer for its status while it runs. ``latest``: the newest answer; empty before the first."""

    def __init__(self, addresses: Path) -> None:
        self.latest: dict[str, Any] = {}
        self._addresses = addresses
        self._tokens, self._seconds = [0.0], [0.0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(ASK_EVERY):
            try:
                known = json.loads(self._addresses.read_text(encoding="utf-8"))
                with urllib.request.urlopen(f"http://{known['http']}/status", timeout=5) as page:
                    self.latest = json.load(page)
            except (OSError, ValueError, HTTPException):
                continue  # there is no syncer yet, or none any more
            self._tokens.append(self.latest["tokens"]["trained"])
            self._seconds.append(self.latest["elapsed_seconds"])

    def seconds_at(self, tokens: int) -> float:
        """Of the job's clock, when so many tokens were trained."""
        return float(np.interp(tokens, self._tokens, self._seconds))

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)


class Programs:
    """The commands of one run, each in a process group of its own with a log in the folder."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._environ = dict(environ)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str | Path, gate: str = "start") -> subprocess.Popen[bytes]:
        """`diloco` with these arguments; its learners join when the gate is opened."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={**self._environ, "BENCH_GATE": str(self.folder / gate)},
                start_new_session=True,
            )
        return self._running[name]

    def open_gate(self, gate: str, learners: int) -> None:
        """Let the learners behind the gate join, when so many are ready."""
        self.until(lambda: len(list(self.folder.glob(f"{gate}.*.ready"))) >= learners, "learners that are ready")
        (self.folder / gate).touch()

    def wait(self, name: str, seconds: float) -> None:
        """Until the command ends, with exit code 0."""
        end = began = time.monotonic()
        end += seconds
        said = began
        while (code := self._running[name].poll()) is None:
            if time.monotonic() > end:
                raise RunFailed(f"{name} goes on after {seconds:g} s\n{self.logs()}")
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                say(f"  {said - began:.0f} s of about {seconds - START_SECONDS + OVERHEAD:.0f}")
            time.sleep(0.1)
        if code != 0:
            raise RunFailed(f"{name} ended with {code}\n{self.logs()}")

    def until(self, condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> Any:
        """Until the condition holds; returns what it gave."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            dead = [name for name, process in self._running.items() if process.poll()]
            if dead or time.monotonic() > end:
                raise RunFailed(f"{what} did not come about; ended: {dead}\n{self.logs()}")
            time.sleep(0.05)
        return found

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.log")
        )

    def close(self) -> None:
        """End what still runs: first politely, for a runner ends its own processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [process for process in self._running.values() if process.poll() is None]
            for process in alive:
                process.send_signal(number)
            end = time.monotonic() + 20.0
            while any(process.poll() is None for process in alive) and time.monotonic() < end:
                time.sleep(0.05)


def run_alone(programs: Programs, job: Path, arm: Arm) -> None:
    programs.start("run", "run", job, "--workdir", programs.folder / "run")
    programs.open_gate("start", arm.learners)
    programs.wait("run", arm.seconds + START_SECONDS)
    for log in (programs.folder / "run" / "logs").glob("*-[0-9]*.log"):
        shutil.copy(log, programs.folder / f"{log.stem}.log")


def run_with_visitors(arm: Arm, programs: Programs, job: Path, watch: StatusWatch) -> float:
    """The syncer here, learners that join it, and others that come and leave. Returns seconds from the first visitor's
    Join to its first merge."""
    workdir = programs.folder / "run"
    programs.start("serve", "syncer", "serve", job, "--workdir", workdir, "--listen", "127.0.0.1:0")
    programs.until(lambda: watch.latest, "the syncer's status")
    address = json.loads((workdir / "address.json").read_text(encoding="utf-8"))["sync"]
    token = ("--join-token-file", workdir / "join-token")

    def join(name: str, gate: str) -> subprocess.Popen[bytes]:
        place = ("--workdir", programs.folder / name)
        return programs.start(name, "learner", "join", address, job, *token, *place, gate=gate)

    def await_second(second: float) -> None:
        programs.until(lambda: watch.latest["elapsed_seconds"] >= second, f"second {second:g} of the job")

    def is_merged() -> bool:
        rows = watch.latest["slots"]
        return len(rows) > arm.learners and rows[arm.learners]["merged_pushes"] > 0

    for n in range(arm.learners):
        join(f"learner-{n}", "start")
    visitors = [join(f"visitor-{number}", f"visit-{number}") for number in range(len(arm.visitors))]
    programs.until(lambda: len(list(programs.folder.glob("visit-*.ready"))) >= len(visitors), "visitors that are ready")
    programs.open_gate("start", arm.learners)
    joined = 0.0
    for number, (since, until) in enumerate(arm.visitors):
        await_second(since * arm.seconds)
        epoch, began = watch.latest["epoch"], time.monotonic()
        programs.open_gate(f"visit-{number}", 1)
        programs.until(is_merged, "a merge of the visitor's work")
        joined = joined or time.monotonic() - began
        await_second(until * arm.seconds)
        visitors[number].send_signal(signal.SIGINT)
        if watch.latest["epoch"] != epoch:
            raise RunFailed("the syncer was restarted")
    programs.wait("serve", arm.seconds + START_SECONDS)
    return joined


def check_pace(folder: Path, quick: bool) -> None:
    """Raise RunFailed where learners could not keep their pace: the figures would be this machine's, not the job's.
    ``quick``: only say it."""
    logs = [path.read_text(errors="replace") for path in sorted(folder.rglob("*.log"))]
    found = [match for text in logs for match in re.findall(r"(\d+) of (\d+) steps took longer than the pace", text)]
    late, steps = (sum(int(match[n]) for match in found) for n in (0, 1))
    if late > MOST_LATE * steps:
        words = f"{late} of {steps} steps were late for their pace: the machine is too busy"
        if not quick:
            raise RunFailed(f"{words}")
        say(f"  {words}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
