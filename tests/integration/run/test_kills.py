"""Learners and syncers killed at random moments of a run: what it costs, and that nothing is lost.

The steps of this model take some 50 ms of one core, so that three learners share two cores and
a merge is under way at most moments.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import grpc
import psutil
import pytest
from runs import Run, check_ledger

import tape_reader
from diloco.processes.workdir import Workdir
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_syncer.audit.store_audit import audit_store
from diloco_syncer.store import records
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import read_document

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: kills}}
spec:
  training:
    model: {{config: {{model_type: llama, hidden_size: 96, intermediate_size: 256, num_hidden_layers: 6,
                     num_attention_heads: 4, num_key_value_heads: 4}}}}
    data: {{source: text, paths: [python-stdlib], sequenceLength: 64}}
    batch: {{sequences: 8}}
    optimizer: {{lr: 0.002, warmupSteps: 20, schedule: constant}}
    device: cpu
    stop: {{{stop}}}
    evaluation: {{fraction: 0.01, everyTokens: 50000, batches: 8}}
  sync: {{fragments: 12, every: 12, overlap: 2, heartbeat: {{timeoutSeconds: 60}}}}
  regions: [{{learners: 3}}]
"""
FRAGMENTS = 12
KILLS = 10
PARTS = ("detected", "joined", "first_step", "recovered")

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]


class Listener:
    """Hears, as an evaluator does, which merges the syncer announces; comes back after each restart."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._over = threading.Event()
        self.heard: list[sync_pb2.Announcement] = []
        self.epochs: list[int] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _listen(self) -> None:
        root = self._run.workdir / "store"
        while not self._over.wait(0.2):
            if not (root / "initial.json").exists():
                continue
            store = DirectoryStore(root)
            name = read_document(store, "initial.json")["layout"]
            raw = records.unpack(store.read(name, records.MAX_FILE), "blob", name)[1]["blob"]
            digest = Layout.from_json(raw.tobytes()).digest
            address = json.loads((self._run.workdir / "address.json").read_text())["sync"]
            join = sync_pb2.Join(
                format=limits.FORMAT,
                job="kills",
                process="ab" * 8,
                role=sync_pb2.ROLE_EVALUATOR,
                region="local",
                layout_digest=digest,
            )
            token = Credentials.from_token_file(self._run.workdir / "join-token")
            with grpc.insecure_channel(address, options=channels.channel_options()) as channel:
                answers = channel.stream_stream(channels.SESSION)(self._say(join), metadata=token.metadata())
                try:
                    for answer in answers:
                        message = sync_pb2.SyncerMessage.FromString(answer)
                        if message.HasField("welcome"):
                            self.epochs.append(message.welcome.epoch)
                        elif message.HasField("announcement"):
                            self.heard.append(message.announcement)
                        if self._over.is_set():
                            break
                except grpc.RpcError:
                    pass  # killed: again at the next syncer
                finally:
                    answers.cancel()

    def _say(self, join: sync_pb2.Join) -> Iterator[bytes]:
        yield sync_pb2.LearnerMessage(join=join).SerializeToString()
        self._over.wait()


def wall_clock(run: Run, row: dict[str, Any]) -> float:
    """When a fault was, by the wall clock: the journal says how it goes with the job's own."""
    rows = [json.loads(line) for line in (run.workdir / "metrics.jsonl").read_text().splitlines()]
    both = [(r["time"], r["elapsed_seconds"]) for r in rows if r["source"] == "status"]
    time, elapsed = min(both, key=lambda pair: abs(pair[1] - row["at_seconds"]))
    return float(time + row["at_seconds"] - elapsed)


def step_times(run: Run) -> dict[str, list[float]]:
    return {f"local-{i}": [r["time"] for r in run.metrics(f"local-{i}")] for i in range(3)}


def within(times: list[float], start: float, end: float) -> int:
    return sum(start <= time < end for time in times)


def print_costs(faults: list[dict[str, Any]]) -> None:
    print("\n" + "fault".ljust(14), *(part.rjust(11) for part in PARTS))
    for fault in faults:
        name = f"{fault['action']} {fault['target'].removeprefix('local-')}"
        print(name.ljust(14), *(f"{fault[f'{part}_seconds']:11.2f}" for part in PARTS))
    print("median".ljust(14), *(f"{median(f[f'{part}_seconds'] for f in faults):11.2f}" for part in PARTS))


@pytest.mark.promise(
    "Ten kills of learners cost only their unmerged steps: the others keep their pace, and each "
    "replacement is merged within seconds"
)
@pytest.mark.ci
def test_ten_kills_of_learners(start: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(20260428)
    at, target, schedule = 0.0, -1, []
    for _ in range(KILLS):
        at += rng.uniform(5, 8)
        target = rng.choice([i for i in range(3) if i != target])  # the other two survive this one
        schedule.append(f"{at:.2f}s:kill:local-{target}")
    run = start("--chaos", ",".join(schedule), text=JOB.format(stop=f"seconds: {math.ceil(at) + 18}"))
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete"
    faults = report["faults"]
    assert len(faults) == KILLS
    for fault in faults:
        costs = [fault[f"{part}_seconds"] for part in PARTS]
        assert None not in costs, (fault, run.everything())
        assert costs == sorted(costs), fault
    with capsys.disabled():
        print_costs(faults)
    assert median(fault["recovered_seconds"] for fault in faults) <= 10

    # The steps of those that were not hit: as many in the seconds after a kill as before it.
    window, ratios = 4.0, []
    steps = step_times(run)
    for fault in faults:
        moment = wall_clock(run, fault)
        for name, times in steps.items():
            busy = [f for f in faults if f is not fault and f["target"] == name]
            away = [(wall_clock(run, f), f["recovered_seconds"]) for f in busy]
            if name == fault["target"] or any(t - window < moment < t + s + window for t, s in away):
                continue
            before = within(times, moment - window, moment)
            ratios.append(before / max(1, within(times, moment, moment + window)))
    with capsys.disabled():
        print("steps before / after a kill:", " ".join(f"{ratio:.2f}" for ratio in sorted(ratios)))
    assert len(ratios) >= 5 and median(ratios) <= 1.5, ratios

    check_ledger(report, FRAGMENTS)
    for row in report["ledger"]:
        # A killed learner takes at most its steps since its last merges with it.
        assert row["reasons"].get("died", 0) <= 0.15 * report["tokens"]["trained"], row
        assert row["reasons"].get("drain", 0) == 0, row
    evaluations = [loss for _, loss in report["eval_loss"]]
    assert all(math.isfinite(loss) for loss in evaluations) and len(evaluations) >= 4
    third = len(evaluations) // 3
    assert median(evaluations[-third:]) < median(evaluations[:third])
    assert report["final_loss"] < report["initial_loss"] - 1
    # Every replacement was merged with: a slot has the first incarnation and one for each kill.
    for slot, learner in enumerate(report["learners"]):
        hits = sum(fault["target"] == f"local-{slot}" for fault in faults)
        assert learner["incarnations"] == 1 + hits, report["learners"]


@pytest.mark.promise(
    "Three kills of the syncer lose no version that a learner was told of, to the byte, and learners train on meanwhile"
)
@pytest.mark.ci
def test_syncers_killed_lose_no_acknowledged_merge(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """By steps and not by seconds: the runner hears of steps from the syncer's status, so none is killed before it has
    claimed its epoch, and between two kills are more steps than learners make alone until they have the next syncer."""
    rng = random.Random(7)
    moments = [rng.randint(20, 50), rng.randint(180, 210), rng.randint(340, 370)]
    chaos = ",".join(f"step={moment}:kill:syncer" for moment in moments)
    # float32 down: what is announced has the same checksum as what the record holds.
    # However long the next syncer takes to begin, nobody has made all the steps that it may make alone.
    words = ("--set", "sync.compression.down=float32", "--set", "sync.staleness.maxSteps=100000")
    run = start("--chaos", chaos, "--seed", "11", *words, text=JOB.format(stop="steps: 540"))
    listener = Listener(run)
    assert run.ends() == 0, run.everything()  # so many steps take as long as the machine does
    listener.stop()
    report = run.report()
    assert report["outcome"] == "complete"
    assert report["syncer"]["restarts"] == 3 and report["syncer"]["epoch"] == 4
    faults = report["faults"]
    assert len(faults) == 3 and None not in [f[f"{part}_seconds"] for f in faults for part in PARTS], faults
    with capsys.disabled():
        print_costs(faults)
    assert median(fault["recovered_seconds"] for fault in faults) <= 10

    # Learners go on alone, from the kill to the first session with the next syncer.
    for fault in faults:
        moment, alone = wall_clock(run, fault), fault["joined_seconds"]
        for number in range(3):
            rows = run.metrics(f"local-{number}")
            rows = [row for row in rows if moment <= row["time"] <= moment + alone]
            assert len(rows) >= 3, (fault, number, rows)
            stalled = rows[-1]["stalled_seconds"] - rows[0]["stalled_seconds"]
            assert stalled <= 0.2 * alone, (fault, number, stalled)

    # Whatever anybody was told of is in the store: the same version, made once, the same bytes.
    assert listener.epochs and {1, 4} <= set(listener.epochs) and len(listener.heard) > 50
    store = DirectoryStore(run.workdir / "store")
    assert tape_reader.verify(store) == report["merges"]
    audit = audit_store(store, Workdir(run.workdir).job_name() or "")
    assert audit.holds and audit.epochs == (1, report["syncer"]["epoch"]), audit
    lines = {(line["fragment"], line["version"]): line for line in tape_reader.read(store)}
    checksums: dict[tuple[int, int], int] = {}
    for news in listener.heard:
        key = (news.fragment, news.version)
        if news.version:
            assert lines[key]["epoch"] == news.epoch, (key, lines[key], news)
        assert checksums.setdefault(key, news.full.checksum) == news.full.checksum, key
    compared = 0
    for key in checksums:
        name = records.record_name(*key)
        if key[1] and (run.workdir / "store" / name).exists():
            record = records.MergeRecord.unpack(store.read(name, records.MAX_FILE), name)
            assert record.digest == records.theta_digest(record.theta) == lines[key]["result"]
            assert bulk.checksum(record.theta) == checksums[key]
            compared += 1
    assert compared >= FRAGMENTS
    check_ledger(report, FRAGMENTS)
    for row in report["ledger"]:  # no learner held a version that is not there any more
        assert "rolled-back" not in row["reasons"] and "died" not in row["reasons"], row
    assert report["final_loss"] < report["initial_loss"] - 1


@pytest.mark.promise("A learner that is ended by SIGTERM offers its work first: nothing of it is dropped but overlap")
@pytest.mark.ci
def test_sigterm_drops_nothing(start: Callable[..., Run]) -> None:
    chaos = "4s:term:local-1,9s:term:local-2,17s:term:local-1,22s:term:local-0"
    run = start("--chaos", chaos, text=JOB.format(stop="seconds: 36"))
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete" and len(report["faults"]) == 4
    assert all(fault[f"{part}_seconds"] is not None for fault in report["faults"] for part in PARTS)
    print_costs(report["faults"])
    check_ledger(report, FRAGMENTS)
    assert all(row["reasons"].keys() <= {"overlap"} for row in report["ledger"]), report["ledger"]
    assert report["tokens"]["dropped"] <= 0.01 * report["tokens"]["trained"]


def shard_processes(run: Run) -> dict[int, psutil.Process]:
    """By number, as far as they have started."""
    found = {}
    for process in run.children():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--shard" in words:
                found[int(words[words.index("--shard") + 1])] = process
    return found


def shards_of(run: Run) -> list[dict[str, Any]]:
    """The status's rows; empty: no syncer answers."""
    with contextlib.suppress(OSError, ValueError):
        address = json.loads((run.workdir / "address.json").read_text())["http"]
        with urllib.request.urlopen(f"http://{address}/status", timeout=5) as answer:
            return list(json.load(answer)["shards"])
    return []


def all_serve(run: Run, killed: int, away: list[float]) -> bool:
    """Whether all shards serve, and none of them is the process that was killed. ``away``: gets times when one does
    not."""
    there, asked = shard_processes(run), time.time()
    serving = [row["serving"] for row in shards_of(run)]
    if not all(serving):
        away.append(asked)
    alive = len(there) == SHARDS and killed not in {process.pid for process in there.values()}
    return alive and serving == [True] * SHARDS


SHARDS = 4
SHARD_KILL_SECONDS = float(os.environ.get("SHARD_KILL_SECONDS", "150"))


@pytest.mark.promise(
    "Shards and their syncer are killed again and again under load: the ledger is exact, and fragments of other shards "
    "go on being merged"
)
@pytest.mark.timeout(400 + int(3 * SHARD_KILL_SECONDS))
def test_shards_and_their_syncer_are_killed_again_and_again(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """SHARD_KILL_SECONDS=600 is ten minutes of it."""
    rng = random.Random(35)
    words = ("--set", f"syncer.shards={SHARDS}", "--set", "sync.staleness.maxSteps=100000")
    run = start(*words, text=JOB.format(stop=f"seconds: {SHARD_KILL_SECONDS:.0f}"))
    run.waits_for("first-merge")
    owner = {p: row["shard"] for row in shards_of(run) for p in row["fragments"]}
    gone: list[tuple[int, float, float]] = []  # shards, from when to when they were away
    syncers = 0
    end = time.time() + SHARD_KILL_SECONDS - 30
    while time.time() < end:
        time.sleep(rng.uniform(4, 8))  # of training, with everybody there
        killed = rng.randrange(SHARDS)
        process = shard_processes(run)[killed]
        with_syncer = rng.random() < 0.2
        victim = process.parent() if with_syncer else process
        assert victim is not None
        victim.kill()
        away = [time.time()]
        run.until(partial(all_serve, run, process.pid, away), "all shards")
        syncers += with_syncer
        gone += [] if with_syncer else [(killed, away[0], away[-1])]
    assert gone, "SHARD_KILL_SECONDS is too short"
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete" and report["syncer"]["restarts"] == syncers
    check_ledger(report, FRAGMENTS)
    store = DirectoryStore(run.workdir / "store")
    assert tape_reader.verify(store) == report["merges"] and audit_store(store, "kills").holds
    assert report["final_loss"] < report["initial_loss"] - 1

    # Merges for each step of a learner, of a quarter of the fragments: while a shard is away, and in all.
    merges = [(line["fragment"], line["time"]) for line in tape_reader.read(store)]
    steps = sorted(time for times in step_times(run).values() for time in times)
    usual = len(merges) / len(steps) / SHARDS
    others = sum(any(owner[p] != shard and a <= t < b for shard, a, b in gone) for p, t in merges)
    own = sum(any(owner[p] == shard and a <= t < b for shard, a, b in gone) for p, t in merges)
    made = sum(any(a <= t < b for _, a, b in gone) for t in steps)
    with capsys.disabled():
        seconds = sum(b - a for _, a, b in gone)
        print(
            f"\n{len(gone)} shards killed, {seconds:.0f} s away in all, {syncers} syncers; meanwhile {others} merges "
            f"of other shards' fragments in {made} steps, {others / made / (SHARDS - 1) / usual:.2f} of the usual"
        )
    assert own == 0 and others / made / (SHARDS - 1) >= 0.7 * usual
