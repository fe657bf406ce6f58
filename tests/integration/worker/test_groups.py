"""Learners of several ranks beside learners of one, through a real syncer."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from forked import ForkedProcess, fork
from group_process import start_group
from learner_process import Syncer
from safetensors.torch import load, load_file

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.spec.sync import LEAST_OF_MEDIAN, AdoptionSpec, MergeSpec
from diloco_protocol.vocabulary import WorkerExit
from diloco_syncer.store import records
from diloco_syncer.store.directory import DirectoryStore
from diloco_worker import load_merged
from free_ports import free_port
from patience import wait_for_end, wait_until

SCENARIOS = Path(__file__).resolve().parents[1] / "group_scenarios.py"
STEPS = 24
DETERMINISTIC = {
    "fragments": 3,
    "every": 6,
    "overlap": 2,
    "deterministic": True,
    "compression": {"up": "float32", "down": "float32"},
}
Forms = list[tuple[str, int, int | None]]  # of each learner: how it is wrapped, its ranks, how many share memory
SINGLE: Forms = [("single", 1, None)]


Trained = tuple[dict[str, torch.Tensor], dict[str, int]]  # the merged model, and what became of the tokens


def train(start: Callable[..., Syncer], forms: Forms, **sync: object) -> tuple[Trained, Syncer]:
    """A deterministic job of these learners to its end."""
    service = start({**DETERMINISTIC, **sync}, {"steps": STEPS}, learners=len(forms))
    started = [start_group(service, ordinal, *form) for ordinal, form in enumerate(forms)]
    for rank in [rank for ranks in started for rank in ranks]:
        assert rank.wait() == 0, rank.log.read_text()
    report = service.last_report()
    assert report["outcome"] == "complete"
    tokens = report["tokens"]
    assert tokens["trained"] == 768 * len(forms) == tokens["merged"] + tokens["dropped"]
    return (load_merged(service.folder), tokens), service


_singles: dict[str, Trained] = {}


def assert_same_as_singles(start: Callable[..., Syncer], forms: Forms, **sync: object) -> None:
    """The groups' model is that of as many single processes, to float32 rounding, and so are their ledgers."""
    key = json.dumps([len(forms), sync], sort_keys=True)
    (merged, tokens), service = train(start, forms, **sync)
    service.stop()
    if key not in _singles:
        for path in service.folder.iterdir():
            path.rename(path.with_name(f"groups-{path.name}"))
        _singles[key] = train(start, SINGLE * len(forms), **sync)[0]
    expected, expected_tokens = _singles[key]
    assert tokens == expected_tokens
    assert (tokens["dropped"] > 0) == (sync.get("adoption") == {"rule": "overwrite"})
    assert merged.keys() == expected.keys()
    for name, values in merged.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=2e-6)


@pytest.mark.promise("A learner of several ranks (DDP, FSDP2, HSDP) makes the model that one process makes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "forms",
    [
        [("ddp", 2, None), ("single", 1, None)],
        [("fsdp", 2, None), ("ddp", 2, 1)],
        [("hsdp", 4, None), ("fsdp", 4, 2)],
        [("columns", 2, None), ("single", 1, None)],
    ],
    ids=["ddp", "fsdp", "hsdp", "columns"],
)
def test_groups_make_the_model_of_single_processes(forms: Forms, syncer: Callable[..., Syncer]) -> None:
    """Among the ranks some have no memory in common with their leader, as if they were on another host."""
    assert_same_as_singles(syncer, forms)


TRAINER = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: a}
spec:
  learners: {processes: 2}
  training: {model: {config: {model_type: llama}}, data: {paths: [python-stdlib]}, device: cpu}
  regions: [{learners: 1}]
"""


@pytest.mark.promise("A rank that waits for the others to be there ends at once when it is told to")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_ends_while_it_waits_for_the_others(tmp_path: Path, rank: int) -> None:
    """Rank 0 waits for who does not come, rank 1 for the answer of one that hangs."""
    (tmp_path / "job.json").write_text(job_to_json(parse_job(TRAINER)))
    with socket.socket() as meeting:
        meeting.bind(("127.0.0.1", 0))
        port = meeting.getsockname()[1]
        meeting.listen() if rank else meeting.close()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "DILOCO_SYNCER": "127.0.0.1:1"}
        environ["DILOCO_JOB_FILE"] = str(tmp_path / "job.json")
        process = fork(["-m", "diloco_worker"], environ, tmp_path / "rank.log")
        if rank:
            meeting.settimeout(60)
            _connection = meeting.accept()
        else:
            wait_until(lambda: listens(port), "rank 0 to wait for the others", process, process.log)
        process.terminate()
        assert wait_for_end(process, silent=20) == -signal.SIGTERM


def listens(port: int) -> bool:
    """Whether somebody listens there; nobody is connected to."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


RULES = get_args(AdoptionSpec.model_fields["rule"].annotation)
METHODS = [name for name in get_args(MergeSpec.model_fields["method"].annotation) if name != "auto"]  # one of these


@pytest.mark.promise("With every merge method and adoption rule several ranks make the model of one process")
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_rule_makes_the_model_of_single_processes(
    method: str, rule: str, syncer: Callable[..., Syncer]
) -> None:
    forms: Forms = [("fsdp", 2, None), *SINGLE]
    sync: dict[str, object] = {"merge": {"method": method}, "adoption": {"rule": rule}}
    if method == "median":
        forms, sync["quorum"] = [*forms, *SINGLE], LEAST_OF_MEDIAN
    assert_same_as_singles(syncer, forms, **sync)


@pytest.mark.promise("A rank that finds its learner's former ranks, of which one still ends, joins none of them")
def test_a_rank_that_finds_the_old_leader_ends(tmp_path: Path) -> None:
    """As a pod whose predecessor was lost: its learner's first pod is still ending, and shows where ranks were."""
    port, started = free_port(), 0

    def start(rank: int, seconds: int = 0) -> ForkedProcess:
        nonlocal started
        started += 1
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return fork([str(SCENARIOS), "meet", str(seconds)], environ, tmp_path / f"{started}.log")

    def see_them_meet(*ranks: ForkedProcess) -> None:
        for rank in ranks:
            wait_until(lambda rank=rank: "met" in rank.log.read_text(), "the ranks to meet", rank, rank.log)

    leader, other = start(0, seconds=600), start(1)
    see_them_meet(leader, other)
    other.kill()
    again = start(1)
    assert wait_for_end(again, again.log) == WorkerExit.GROUP
    assert "another process has been rank 1" in again.log.read_text()
    assert leader.poll() is None
    leader.kill()
    leader.wait()
    leader, other = start(0), start(1)
    see_them_meet(leader, other)
    leader.kill()
    assert wait_for_end(other, other.log) == WorkerExit.GROUP


@pytest.mark.promise(
    "A learner's optimizer state goes to one of any number of ranks, by a peer and by both checkpoints"
)
@pytest.mark.slow
def test_the_state_goes_between_groups_of_any_size(syncer: Callable[..., Syncer]) -> None:
    """From 8 ranks to 1 by the slot's checkpoint, from 1 to 8 by a peer, from 8 to 16 by the job's checkpoint."""
    staleness = {"maxSteps": 100_000, "maxVersions": 100_000}
    sync = {"fragments": 3, "every": 6, "overlap": 1, "quorum": 1, "staleness": staleness}
    service = syncer(sync, {"steps": 1_000_000}, learners=2, service={"checkpoint": {"everySeconds": 1}})
    own, found = service.folder / "state" / "local-0.safetensors", service.folder / "found.safetensors"

    def start(ordinal: int, form: str, size: int, source: str) -> list[ForkedProcess]:
        """The learner, once its first step is before it, with a state of this source."""
        found.unlink(missing_ok=True)
        variables = {"FOUND": str(found), "SEQUENCES": "16", "PAUSE": "0.02"}
        ranks = start_group(service, ordinal, form, size, near=-(-size // 2), **variables)
        wait_until(found.exists, f"the first step of {size} ranks", ranks[0], ranks[0].log)
        log = ranks[0].log.read_text()
        assert f"continues from the state of the {source}" in log or not source, log
        return ranks

    eight = start(0, "fsdp", 8, "")
    wait_until(own.exists, "the slot's own checkpoint", eight[0], eight[0].log)
    for rank in eight:
        rank.kill()
    for rank in eight:
        rank.wait()
    kept = load_file(own)
    (single,) = start(0, "single", 1, "slot's own checkpoint")
    torch.testing.assert_close(load_file(found), kept, rtol=0, atol=0)

    eight = start(1, "fsdp", 8, "peer")
    assert load_file(found)["0.weight|step"] > kept["0.weight|step"]
    single.terminate()
    assert single.wait() == 0, single.log.read_text()
    wait_until(lambda: service.status()["slots"][1]["steps"] > 0, "a step", eight[0], eight[0].log)
    service.announce("suspended")
    for rank in eight:
        assert rank.wait() == 0, rank.log.read_text()
    assert service.process is not None and service.process.wait() == 0
    store = DirectoryStore(service.folder / "store")
    (name,) = store.list("optimizer")
    kept = load(records.unpack(store.read(name, records.MAX_FILE), "blob", name)[1]["blob"].tobytes())
    shutil.rmtree(own.parent)
    service.start()
    sixteen = start(1, "fsdp", 16, "job's checkpoint")
    torch.testing.assert_close(load_file(found), kept, rtol=0, atol=0)
    for rank in sixteen:
        rank.kill()
