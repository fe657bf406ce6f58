"""Learners of several ranks in a run: each is one learner, whatever happens to one of its processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from runs import Run, check_ledger

from diloco_worker import load_merged
from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A group and a single process, which merge together or not at all.
GROUPS = """
  learners: {stallSeconds: 30}
"""
REGIONS = "regions=[{name: group, learners: 1, processes: 2}, {name: alone, learners: 1}]"


LOOP = """
import torch
from torch.distributed.fsdp import fully_shard
import diloco_worker

diloco_worker.configure_logging()
torch.distributed.init_process_group("gloo")
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(4096, 6)
data = [{"x": x, "y": x.sum(0, keepdim=True)} for x in inputs]
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches(data):
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.after_step(tokens=len(batch["x"]), loss=loss.detach())
raise SystemExit(learner.exit_code)
"""
OWN = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: own}}
spec:
  training: {{batch: {{sequences: 8}}, stop: {{steps: 200}}}}
  sync: {{fragments: 2, every: 8, overlap: 1}}
  learners: {learners}
  regions: [{{learners: 1}}]
"""


def ranks_left(run: Run) -> list[int]:
    """Processes of the run that are left after it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DILOCO_WORKDIR") == str(run.workdir):
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def start_groups(start: Callable[..., Run], *arguments: str, steps: int) -> Run:
    return start("--set", REGIONS, "--set", "sync.quorum=2", *arguments, steps=steps, change=GROUPS)


def is_trained_to_its_end(run: Run) -> None:
    everything = run.children()
    assert run.ends() == 0, run.everything()
    report = run.report()
    check_ledger(report)
    assert report["outcome"] == "complete" and report["final_loss"] < report["initial_loss"] - 0.5
    assert not [one for one in everything if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.ci
@pytest.mark.promise("`diloco run` starts learners of several processes beside single ones, and no token is lost")
def test_a_group_and_a_single_process_train_one_model(start: Callable[..., Run]) -> None:
    run = start_groups(start, steps=60)
    run.until(lambda: sorted(run.ranks("group")) == [0, 1], "two ranks")  # they load for longer than they train
    is_trained_to_its_end(run)
    log = (run.workdir / "logs" / "group-0.log").read_text()
    assert "[rank 1] " in log and "slot 0" in log and "first-merge: group-0" in run.output
    assert run.report()["tokens"]["dropped"] == 0


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_a_rank_that_is_killed_ends_its_learner_which_comes_back_as_one(
    start: Callable[..., Run], rank: int, number: int
) -> None:
    run = start_groups(start, steps=400)
    run.waits_for("first-merge: group-0")
    before = run.ranks("group")
    before[rank].send_signal(number)
    run.until(lambda: not any(one.is_running() for one in before.values()), "the ranks' end")
    run.until(lambda: len(run.ranks("group")) == 2, "two new ranks")
    assert not set(run.ranks("group").values()) & set(before.values())
    run.until(lambda: run.output.count("joined: group-0") == 2, "the learner's return")
    is_trained_to_its_end(run)


@pytest.mark.parametrize("action", ["kill", "term", "pause"])
def test_what_chaos_does_to_a_learner_it_does_to_all_its_ranks(start: Callable[..., Run], action: str) -> None:
    lasting = ":2s" if action == "pause" else ""
    run = start_groups(start, "--chaos", f"step=40:{action}:group-0{lasting}", steps=400)
    run.waits_for(f"chaos: {action} group-0")
    if action == "pause":
        run.until(
            lambda: {one.status() for one in run.ranks("group").values()} == {psutil.STATUS_STOPPED}, "stopped ranks"
        )
    else:
        run.until(lambda: run.output.count("joined: group-0") == 2, "the learner's return")
    is_trained_to_its_end(run)


@pytest.mark.parametrize(
    "learners",
    [
        "{processes: 2, command: [python, loop.py]}",
        "{command: [python, -m, torch.distributed.run, --standalone, --nproc-per-node=2, loop.py]}",
    ],
    ids=["processes", "torchrun"],
)
def test_a_loop_of_ones_own_trains_in_ranks(start: Callable[..., Run], tmp_path: Path, learners: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = start(text=OWN.format(learners=learners))
    assert run.ends() == 0, run.everything()
    report = run.report()
    check_ledger(report, len(report["ledger"]))
    assert report["outcome"] == "complete" and report["tokens"]["merged"] >= 8 * 200
    assert not ranks_left(run)


ONE_LEARNER = [
    "training.stop={steps: 16}",
    "training.evaluation=null",
    "regions.0.learners=1",
    "sync.deterministic=true",
]
TWO_RANKS = "learners.processes=2"
TWO_PASSES = "training.batch={sequences: 4, accumulation: 2}"  # the same batch as the example's, of 8 sequences
UNCLIPPED = "training.optimizer.clipNorm=null"


@pytest.fixture
def train_example(tmp_path: Path) -> Iterator[Callable[..., dict[str, torch.Tensor]]]:
    """Train examples/tiny-gpt.yaml with these changes: the merged model."""
    job = tmp_path / "tiny-gpt.yaml"
    job.write_text((ROOT / "examples" / "tiny-gpt.yaml").read_text())
    runs: list[Run] = []

    def train(*changes: str) -> dict[str, torch.Tensor]:
        words = [word for change in (*ONE_LEARNER, *changes) for word in ("--set", change)]
        run = Run(job, tmp_path / f"run-{len(runs)}", *words)
        runs.append(run)
        assert run.ends() == 0, run.everything()
        report = run.report()
        assert report["tokens"]["merged"] == 16 * 8 * 128 and report["merges"] >= 12
        return load_merged(run.workdir)

    yield train
    for run in runs:
        run.ended_whole()


@pytest.mark.promise("In deterministic mode two ranks train, bit for bit, what one process does with the joined batch")
def test_two_ranks_train_what_one_process_does(train_example: Callable[..., dict[str, torch.Tensor]]) -> None:
    """Bit for bit where one process adds up gradients as the ranks do, in a pass for each share of the batch, and none
    are clipped: the norm of gradients is a sum in another order where they are divided."""
    ranks = train_example(TWO_RANKS, UNCLIPPED)
    alone = train_example(TWO_PASSES, UNCLIPPED)
    assert ranks.keys() == alone.keys()
    assert all(torch.equal(ranks[name], alone[name]) for name in ranks)


@pytest.mark.promise("Two ranks train what one process does with the joined batch in one pass, to float32 rounding")
def test_two_ranks_train_the_joined_batch_to_rounding(train_example: Callable[..., dict[str, torch.Tensor]]) -> None:
    """As the example has it otherwise, but for the exchange in float32: int4 would make steps of what is rounding."""
    exact = "sync.compression={up: float32, down: float32}"
    ranks, alone = train_example(TWO_RANKS, exact), train_example(exact)
    assert ranks.keys() == alone.keys()
    for name, values in ranks.items():
        assert (values - alone[name]).norm() < 2e-4 * alone[name].norm(), name
