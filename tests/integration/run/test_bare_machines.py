"""A job on bare machines, with certificates: served by one command, joined by others, one of which leaves
and one of which is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import ENV, JOB, RUN_SECONDS

from diloco_protocol.spec.load import parse_job
from free_ports import free_port
from patience import own_work, wait_for_end, wait_until

WORDS = "the quick brown fox jumps over the lazy dog and runs away from the angry bear\n"


class Program:
    """One `diloco` command in a process of its own, its output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str | Path) -> None:
        self.log = folder / f"{name}.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", *map(str, arguments)],
                cwd=folder,
                env=ENV,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        return wait_for_end(self.process, self.log, longest=RUN_SECONDS)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            children = self.children()
            self.process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                    child.kill()
            self.process.wait()
            wait_until(lambda: all(map(has_ended, children)), f"the end of {children}")


def has_ended(process: psutil.Process) -> bool:
    """Perhaps nobody asks for its exit code."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def make(name: str, *arguments: str | Path, folder: Path = tmp_path) -> Program:
        running.append(Program(folder, name, *arguments))
        return running[-1]

    yield make
    for program in running:
        program.close()


def certificates(folder: Path, job: Path) -> Path:
    for arguments in (["init", "--out", "pki"], ["issue", str(job), "--pki", "pki"]):
        command = [sys.executable, "-m", "diloco.main", "certs", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    return folder / "pki" / "default" / "tiny"


@pytest.mark.promise(
    "Machines join a served job, leave it and are lost, and the job trains on, also after its syncer was started again"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.ci
def test_machines_join_leave_and_are_lost(tmp_path: Path, start: Callable[..., Program]) -> None:
    """The job trains until all has happened that shall: only the syncer at the end is told of a stop that is near."""
    (tmp_path / "corpus.txt").write_text(WORDS * 2000)
    text = JOB.format(steps=1, learners=2).replace("stop: {steps: 1}", "stop: {tokens: 1e12}")
    text = text.replace("timeoutSeconds: 60", "timeoutSeconds: 3")  # nobody else tells the syncer of one that is killed
    text = text.replace("[corpus.txt]", f"[{tmp_path}/corpus.txt]")
    job = tmp_path / "job.yaml"
    job.write_text(text)
    assert parse_job(text).spec.slots == 2
    pki = certificates(tmp_path, job)

    def serve(name: str, listen: str, *words: str | Path) -> Program:
        place = ("--workdir", "hub", "--listen", listen, "--credentials", pki / "syncer")
        return start(name, "syncer", "serve", job, *place, "--evaluator-credentials", pki / "learners", *words)

    served = serve("served", f"127.0.0.1:{free_port()}")  # where another one listens later
    address_file = tmp_path / "hub" / "address.json"
    last: dict[str, Any] = {}

    def until(condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, what, served.process, own_work, tmp_path)

    def slots() -> list[dict[str, Any]]:
        address = json.loads(address_file.read_text())["http"]
        with urllib.request.urlopen(f"http://{address}/status", timeout=60) as page:
            last.update(json.load(page))
        found: list[dict[str, Any]] = last["slots"]
        return found

    until(address_file.exists, "the address file")
    sync = json.loads(address_file.read_text())["sync"]

    def join(name: str, *arguments: str | Path) -> Program:
        return start(name, "learner", "join", sync, "--credentials", pki / "learners", "--workdir", name, *arguments)

    # One has no job file: it gets the job from the hub, and its region from the certificate.
    leaving, killed = join("leaving"), join("killed", job, "--region", "local")
    until(lambda: all(slot["merged_pushes"] > 0 for slot in slots()), "a merge of both")
    before = {slot["process"] for slot in slots()}
    (worker,) = [child for child in killed.children() if "diloco_worker" in " ".join(child.cmdline())]
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    until(lambda: has_ended(worker), "its worker's end")
    third = join("third")  # while the first is there, whose optimizer's state it takes over

    def successors() -> list[dict[str, Any]]:
        return [slot for slot in slots() if slot["process"] not in before and slot["state"] == "active"]

    until(successors, "a successor of the killed one")
    merged = successors()[0]["merged_pushes"]
    until(lambda: any(slot["merged_pushes"] > merged for slot in successors()), "a merge of the third")
    leaving.process.send_signal(signal.SIGINT)  # Ctrl-C: it offers its work
    assert leaving.ends() == 0, leaving.output
    until(lambda: "drained" in [slot["state"] for slot in slots()], "the leaving one's end")
    # The hub's machine is lost too, and its successor, at the same address, has a stop that is near.
    served.close()
    near = ("--set", "training.stop.tokens=150000")
    served = serve("succeeding", sync, *near)
    assert served.ends() == 0, served.output
    assert third.ends() == 0, third.output
    report = json.loads((tmp_path / "hub" / "report.json").read_bytes())
    assert report["outcome"] == "complete" and report["final_loss"] is not None
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"] >= 150_000
    # Each has taken a seat, and the third a second one, of the succeeding syncer; more where one was silent for 3 s.
    assert sum(row["incarnations"] for row in report["learners"]) >= 4
    dropped = {reason for row in report["ledger"] for reason in row["reasons"]}
    assert dropped <= {"died", "overlap", "stale"}, "who left in good order dropped nothing"
    handed = json.loads((tmp_path / "leaving" / "job.json").read_text())
    assert handed["metadata"]["name"] == "tiny"
    places = [json.loads((tmp_path / n / "place.json").read_text())["ordinal"] for n in ("leaving", "third")]
    assert len(set(places)) == 2
    for name in ("leaving", "killed", "third"):  # keys stay where they are
        for path in (tmp_path / name).rglob("*.json"):
            assert "PRIVATE KEY" not in path.read_text()
    # It is complete, and whoever comes now is told so.
    again = serve("again", "127.0.0.1:0", *near)
    assert again.ends() == 0 and "complete already" in again.output


@pytest.mark.slow
def test_a_stranger_does_not_get_the_job(tmp_path: Path, start: Callable[..., Program]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(steps=1, learners=1))
    pki = certificates(tmp_path, job)
    served = start(
        "served", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--credentials", pki / "syncer"
    )
    address_file = tmp_path / "hub" / "address.json"
    wait_until(address_file.exists, "the address file", served.process, served.log)
    sync = json.loads(address_file.read_text())["sync"]
    plain = start("plain", "learner", "join", sync)
    assert plain.ends() == 1 and "cannot read the job" in plain.output
    (pki / "learners" / "join-token").write_text("guessed\n")
    wrong = start("wrong", "learner", "join", sync, "--credentials", pki / "learners")
    assert wrong.ends() == 1 and "token" in wrong.output
    other = tmp_path / "other"
    other.mkdir()
    strangers = certificates(other, job)
    stranger = start("stranger", "learner", "join", sync, "--credentials", strangers / "learners")
    assert stranger.ends() == 1 and "not trusted" in stranger.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_third_learner_trains_beyond_the_two_of_the_job(tmp_path: Path, start: Callable[..., Program]) -> None:
    """It joins, is merged and leaves, under one syncer; each region's learners have their own batch."""
    (tmp_path / "corpus.txt").write_text(WORDS * 2000)
    text = JOB.format(steps=1, learners=2).replace(
        "{learners: 2}", "{learners: 2, maxLearners: 3, batch: {sequences: 2}}"
    )
    text = text.replace("stop: {steps: 1}", "stop: {seconds: 600}").replace("warmupSteps: 10", "schedule: constant")
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("[corpus.txt]", f"[{tmp_path}/corpus.txt]"))
    serve = ("syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--no-evaluator")
    served = start("served", *serve)
    addresses = tmp_path / "hub" / "address.json"
    last: dict[str, Any] = {}

    def until(condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, what, served.process, own_work, tmp_path)

    def slots() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{known['http']}/status", timeout=60) as page:
            last.update(json.load(page))
        return list(last["slots"])

    until(addresses.exists, "the address file")
    known = json.loads(addresses.read_text())
    join = ("learner", "join", known["sync"], "--join-token-file", tmp_path / "hub" / "join-token")
    for name in ("one", "two"):
        start(name, *join, "--workdir", name)
    until(lambda: all(row["merged_pushes"] > 0 for row in slots()), "a merge of both")
    visitor = start("visitor", *join, "--workdir", "visitor")
    until(lambda: len(slots()) == 3 and last["slots"][2]["merged_pushes"] > 0, "a merge of the third")
    assert last["quorum"]["active"] == 3 and not last["slots"][2]["retired"] and last["standby"] == 0
    visitor.process.send_signal(signal.SIGINT)
    assert visitor.ends() == 0, visitor.output
    until(lambda: [row["retired"] for row in slots()] == [False, False, True], "its slot's end")
    assert last["epoch"] == 1 and last["phase"] == "training"
    served.process.send_signal(signal.SIGINT)
    assert served.ends() == 130, served.output
    report = json.loads((tmp_path / "hub" / "report.json").read_bytes())
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    for row in report["learners"]:
        assert row["tokens"] == 2 * 32 * row["steps"] > 0, "the region's batch, and not training.batch"


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_with_another_corpus_of_the_same_size_is_refused(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    """English on one machine and digits on the other, both at the path that the job names."""
    texts = {"english": WORDS * 500, "digits": (("0123456789" * 8)[: len(WORDS) - 1] + "\n") * 500}
    assert len({len(text) for text in texts.values()}) == 1
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(steps=1_000_000, learners=2))
    served = start("served", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--no-evaluator")
    addresses = tmp_path / "hub" / "address.json"
    wait_until(addresses.exists, "the address file", served.process, served.log)
    sync = json.loads(addresses.read_text())["sync"]
    joined = {}
    for name, text in texts.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "corpus.txt").write_text(text)
        (folder / "job.yaml").write_text(job.read_text())
        join = ("learner", "join", sync, "job.yaml", "--join-token-file", tmp_path / "hub" / "join-token")
        joined[name] = start(name, *join, "--workdir", "work", folder=folder)
        if name == "english":
            first = joined[name]
            wait_until(lambda: "took slot" in served.output, "its slot", first.process, own_work, first.log)
    refused = joined["digits"]
    assert refused.ends() == 1, refused.output
    words = "as many sequences as the job's, and other content (items 0 to 255 are the first that differ)"
    assert words in refused.output and "give every learner the same data" in refused.output
    assert joined["english"].process.poll() is None, joined["english"].output


@pytest.mark.promise(
    "A job without certificates refuses every client that cannot read its join token", section="Hostile callers"
)
@pytest.mark.slow
def test_without_certificates_the_join_token_keeps_others_out(tmp_path: Path, start: Callable[..., Program]) -> None:
    (tmp_path / "corpus.txt").write_text(WORDS * 500)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(steps=20, learners=1))
    served = start("served", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0")
    address_file, token = tmp_path / "hub" / "address.json", tmp_path / "hub" / "join-token"
    wait_until(address_file.exists, "the address file", served.process, served.log)
    assert f"--join-token-file {token}" in served.output and token.stat().st_mode & 0o777 == 0o600
    sync = json.loads(address_file.read_text())["sync"]
    (tmp_path / "guessed").write_text("guessed\n")
    for name, words in (("stranger", []), ("guessing", ["--join-token-file", "guessed"])):
        refused = start(name, "learner", "join", sync, *words)
        assert refused.ends() == 1 and "the join token is missing or wrong" in refused.output
        assert "--join-token-file" in refused.output
    guest = start("guest", "learner", "join", sync, "--join-token-file", token, "--workdir", "guest")
    assert served.ends() == 0 and guest.ends() == 0, served.output + guest.output
    assert json.loads((tmp_path / "hub" / "report.json").read_bytes())["final_loss"] is not None, "the evaluator too"


@pytest.mark.promise(
    "`diloco learner join --nnodes` makes one learner of several machines; it is lost, and leaves, as one"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_machines_are_one_learner(tmp_path: Path, start: Callable[..., Program]) -> None:
    (tmp_path / "corpus.txt").write_text(WORDS * 2000)
    text = JOB.format(steps=1, learners=1).replace("stop: {steps: 1}", "stop: {tokens: 1e12}")
    text = text.replace("{learners: 1}", "{learners: 1, processes: 2}").replace(
        "timeoutSeconds: 60", "timeoutSeconds: 3"
    )
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("[corpus.txt]", f"[{tmp_path}/corpus.txt]"))
    served = start("served", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--no-evaluator")
    addresses = tmp_path / "hub" / "address.json"
    wait_until(addresses.exists, "the address file", served.process, served.log)
    known = json.loads(addresses.read_text())
    words = ("learner", "join", known["sync"], "--join-token-file", tmp_path / "hub" / "join-token", "--nnodes", "2")
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    nodes = [start(f"node-{node}", *words, "--node-rank", str(node), *meeting) for node in range(2)]

    def row() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{known['http']}/status", timeout=60) as page:
            return dict(json.load(page)["slots"][0])

    def ranks(node: Program) -> list[tuple[str, psutil.Process]]:
        found = []
        for one in node.children():
            with contextlib.suppress(psutil.Error):
                if "diloco_worker.launch" not in one.cmdline() and (rank := one.environ().get("RANK")):
                    found.append((rank, one))
        return found

    wait_until(lambda: row()["merged_pushes"] > 0, "a merge", served.process, own_work, tmp_path)
    assert row()["ranks"] == 2 and [rank for node in nodes for rank, _ in ranks(node)] == ["0", "1"]
    ((_, second),) = ranks(nodes[1])
    second.kill()
    before = row()["incarnation"]
    wait_until(lambda: row()["incarnation"] > before, "the learner's return", served.process, own_work, tmp_path)
    merged = row()["merged_pushes"]
    wait_until(lambda: row()["merged_pushes"] > merged, "a merge of its", served.process, own_work, tmp_path)
    nodes[1].process.send_signal(signal.SIGINT)
    assert [node.ends() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    served.process.send_signal(signal.SIGINT)
    assert served.ends() == 130, served.output
    tokens = json.loads((tmp_path / "hub" / "report.json").read_bytes())["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"] > 0
