"""The learner library against a real syncer process, with a small torch model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_process import Rows, Syncer, make_job, one_step, small_model
from safetensors.torch import load_file

from diloco.export.export import ExportFailed, read_run, write_merged
from diloco.processes.workdir import Workdir
from diloco_protocol.arrays.layout import Layout
from diloco_worker import Learner, Observer, load_merged
from diloco_worker.settings import WorkerError
from patience import wait_until

pytestmark = pytest.mark.usefixtures("torch_settings")

EXACT = {
    "fragments": 1,
    "every": 1,
    "overlap": 0,
    "deterministic": True,
    "adoption": {"rule": "overwrite"},
    "outer": {"optimizer": "sgd", "lr": 1.0},
    "compression": {"up": "float32", "down": "float32"},
    "merge": {"method": "mean"},
}


@pytest.mark.promise("A job with its own loop can be exported, in shards if it is large, whole or not at all")
def test_one_learner_merged_at_every_step_is_plain_training(syncer: Callable[..., Syncer]) -> None:
    """H = P = M = 1, τ = 0, plain SGD with lr 1, float32, overwrite: as if nothing of this were there."""
    service = syncer(EXACT, {"steps": 25})
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    plain = small_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    losses = []
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows()):
            loss = one_step(model, optimizer, batch)
            losses.append((float(loss), float(one_step(plain, plain_optimizer, batch))))
            learner.after_step(tokens=batch.numel(), loss=loss)
    assert (learner.step, learner.tokens) == (25, 25 * 32)
    for own, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, reference, rtol=0, atol=2e-5)
    assert losses[-1][0] < losses[0][0]
    report = service.last_report()
    assert report["outcome"] == "complete"
    assert report["merges"] == 25
    assert report["tokens"] == {"trained": 800, "merged": 800, "pending": 0, "dropped": 0}
    # The job has no training.model: what is exported are the parameters by name, for the program that knows the model.
    out = service.folder / "exported"
    write_merged(read_run(Workdir(service.folder)), out)
    other = small_model(99)
    other.load_state_dict(load_file(out / "model.safetensors"))
    for own, exported in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, exported, rtol=0, atol=0)
    loaded = load_merged(service.folder)  # the same without the files
    assert loaded.keys() == dict(model.named_parameters()).keys()
    for name, own in model.named_parameters():
        torch.testing.assert_close(own.data, loaded[name], rtol=0, atol=0)
    assert Layout.from_json((out / "layout.json").read_bytes()).digest == learner.layout.digest
    with pytest.raises(ExportFailed, match="exists already"):
        write_merged(read_run(Workdir(service.folder)), out)
    with pytest.raises(WorkerError, match="out-of-the-way is no run's directory"):
        load_merged(service.folder / "out-of-the-way")


@pytest.mark.slow
def test_learners_race_and_every_token_is_in_its_column(syncer: Callable[..., Syncer]) -> None:
    """Two learner processes, three fragments, int4 up with feedback, bfloat16 down; an observer follows."""
    sync = {"quorum": 2, "compression": {"up": "int4", "errorFeedback": True}, "outer": {"optimizer": "sgd", "lr": 1.0}}
    service = syncer(sync, {"tokens": 6000}, 2)
    learners = [service.learner(ordinal) for ordinal in range(2)]
    watched = small_model(7)
    try:
        with Observer.from_environment(watched, environ=service.environ("evaluator")) as observer:

            def is_current() -> bool:
                observer.wait_for_change(1.0)
                if not observer.current and not observer.refreshing:
                    observer.refresh()
                return observer.ended and observer.current

            wait_until(is_current, "the observer to have the last versions")
            versions = observer.current_versions()
            assert observer.complete
        assert [learner.wait() for learner in learners] == [0, 0]
        said = [json.loads(service.metrics_file(ordinal).read_text()) for ordinal in range(2)]
    finally:
        for learner in learners:
            learner.kill()
    report = service.last_report()
    assert report["outcome"] == "complete"
    assert [min(versions), max(versions)] == [report["versions"]["min"], report["versions"]["max"]]
    assert min(versions) >= 2
    trained = report["tokens"]["trained"]
    assert trained == sum(one["tokens"] for one in said) >= 6000
    # Of a fragment one of the two may have had nothing left to offer at the end, and a merge takes both.
    assert report["tokens"]["dropped"] == 0 and report["tokens"]["pending"] <= 16 * 32  # one learner's steps alone
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == trained
    assert all(one["bytes_up"] > 0 for one in said)
    fresh, data = small_model(7), Rows()
    with torch.no_grad():
        before = (fresh(data.rows).squeeze(1) - data.rows.sum(1)).square().mean()
        after = (watched(data.rows).squeeze(1) - data.rows.sum(1)).square().mean()
    assert after < 0.5 * before, "the merged model learnt"
    lines = (service.folder / "metrics" / "local-1.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == said[1]["step"]
    assert json.loads(lines[-1])["tokens"] == said[1]["tokens"]


@pytest.mark.promise("Schedules follow the job's progress to its stop, whatever share of it a slot trains")
@pytest.mark.parametrize("stop", [{"tokens": 6400}, pytest.param({"seconds": 600}, marks=pytest.mark.slow)])
def test_progress_is_the_jobs_way_to_its_stop(syncer: Callable[..., Syncer], stop: dict[str, int]) -> None:
    """One of two learners never comes: the other trains for both, and its progress reaches the end with the job, or
    follows the job's time, of which it knows only what the syncer says."""
    service = syncer({"quorum": 1}, stop, 2)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen, seeds, elapsed = [], set(), 0.0
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows()):
            seen.append((learner.progress, min(1.0, learner.tokens / 6400)))
            seeds.add(learner.seed)
            learner.after_step(tokens=batch.numel(), loss=one_step(model, optimizer, batch))
            if "seconds" in stop and len(seen) >= 20:
                elapsed = elapsed or service.status()["elapsed_seconds"]  # 0 until the first step is reported
                if elapsed and seen[-1][0] >= elapsed / 600:
                    break
    progress = [one for one, _ in seen]
    assert progress == sorted(progress)
    assert progress[0] < 0.2
    assert len(seeds) == len(seen)
    if "tokens" in stop:
        assert all(one >= own for one, own in seen)
        assert progress[-1] > 0.9
        middle = [one for one, own in seen if 0.45 < own < 0.55]
        assert middle and all(0.4 < one < 0.6 for one in middle)
    else:
        assert 0 < progress[-1] <= service.status()["elapsed_seconds"] / 600


def test_tokens_that_are_no_count_are_refused_at_once(syncer: Callable[..., Syncer]) -> None:
    service = syncer({"every": 8, "overlap": 2}, {"steps": 100_000})
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with (
        pytest.raises(WorkerError, match=r"after_step\(tokens=-5\): tokens is how many tokens"),
        Learner.from_environment(model, optimizer, environ=service.environ()) as learner,
    ):
        for _ in learner.batches(Rows()):
            learner.after_step(tokens=-5)
    assert learner.tokens == 0


def test_sigterm_drops_no_token(syncer: Callable[..., Syncer]) -> None:
    service = syncer({"every": 8, "overlap": 2}, {"steps": 100_000})
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows()):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            if learner.step == 61:
                os.kill(os.getpid(), signal.SIGTERM)
    assert learner.draining
    assert learner.step == 61
    wait_until(lambda: service.status()["slots"][0]["state"] == "drained", "the slot to be free")
    tokens = service.report()["tokens"]
    assert tokens["trained"] == 61 * 32
    assert tokens["dropped"] == 0


def test_the_syncer_is_killed_and_the_learner_goes_on(syncer: Callable[..., Syncer]) -> None:
    service = syncer({"staleness": {"maxSteps": 100_000}}, {"steps": 100_000})
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    alone_from = alone_to = 0
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            time.sleep(0.002)
            if learner.step == 40:
                merges = service.status()["merges"]
                service.kill()
                alone_from = learner.step
            if alone_from and not alone_to and learner.step >= alone_from + 50:
                service.start()
                alone_to = learner.step
                back = service.status()
                assert back["epoch"] == 2
                assert back["merges"] >= merges, "no acknowledged merge is lost"
            if alone_to and learner.step % 20 == 0:
                status = service.status()
                if status["merges"] >= merges + 6 and status["slots"][0]["state"] == "active":
                    os.kill(os.getpid(), signal.SIGTERM)
    assert learner.step >= alone_to
    wait_until(lambda: service.status()["slots"][0]["state"] == "drained", "the slot to be free")
    tokens = service.report()["tokens"]
    assert tokens["trained"] == learner.step * 32
    assert tokens["dropped"] == 0


@pytest.mark.slow
def test_two_deterministic_runs_are_bit_identical(tmp_path: Path) -> None:
    """Two learners, three fragments, int4 up, keep, τ = 2; and another seed differs."""
    sync = {"deterministic": True, "overlap": 2, "compression": {"up": "int4"}}
    tapes = []
    for run, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(run)
        folder.mkdir()
        job = make_job(sync, {"steps": 13}, 2, seed)
        service = Syncer(folder, job)
        learners = []
        try:
            service.start()
            learners = [service.learner(ordinal) for ordinal in range(2)]
            assert [learner.wait() for learner in learners] == [0, 0]
            report = service.last_report()
        finally:
            service.stop()
            for learner in learners:
                learner.kill()
        assert report["tokens"] == {"trained": 26 * 32, "merged": 26 * 32, "pending": 0, "dropped": 0}
        assert report["steps"] == 13
        tapes.append(service.tape())
    assert len(tapes[0]) >= 9
    assert tapes[0] == tapes[1]
    assert tapes[0] != tapes[2]


@pytest.mark.slow
def test_a_replacement_goes_on_with_a_peers_optimizer_state(syncer: Callable[..., Syncer]) -> None:
    # Steps of a millisecond leave no grace: a learner may be late in any number of rounds running. None is lost: a
    # newcomer of the same place takes the slot at once.
    staleness = {"maxSteps": 100_000, "maxVersions": 100_000}
    heartbeat = {"intervalSeconds": 0.1, "timeoutSeconds": 60}
    service = syncer({"staleness": staleness, "heartbeat": heartbeat}, {"steps": 1_000_000}, 2)
    learners = [service.learner(ordinal, 40_000) for ordinal in range(2)]
    try:
        wait_until(lambda: service.status()["merges"] > 10, "merges")
        wait_until(lambda: min(s["merged_pushes"] for s in service.status()["slots"]) > 0, "both in merges")
        learners[1].kill()
        learners[1].wait()
        reached = service.status()["slots"][1]["step"]
        learners[1] = service.learner(1, 40_000)
        wait_until(lambda: service.status()["slots"][1]["state"] == "active", "the replacement")
        wait_until(lambda: service.status()["slots"][1]["step"] > reached + 20, "its steps")
        for learner in learners:
            learner.terminate()
        assert [learner.wait() for learner in learners] == [0, 0]
        said = [json.loads(service.metrics_file(ordinal).read_text()) for ordinal in range(2)]
    finally:
        for learner in learners:
            learner.kill()
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "the inner optimizer continues from the state of the peer" in log
    report = service.report()
    assert report["learners"][1]["incarnations"] == 2
    assert report["steps"] == max(one["step"] for one in said)
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == report["tokens"]["trained"]
        assert set(row["reasons"]) <= {"died"}


@pytest.mark.slow
def test_where_nobody_left_an_optimizer_state_the_newcomer_begins_fresh(syncer: Callable[..., Syncer]) -> None:
    sync = {"staleness": {"maxSteps": 100_000, "maxVersions": 100_000}}
    service = syncer(sync, {"steps": 1_000_000}, 1, {"checkpoint": {"everySeconds": 3600}})
    learner = service.learner(0, 40_000)
    try:
        wait_until(lambda: service.status()["merges"] > 5, "merges")
        learner.kill()
        learner.wait()
        reached = service.status()["merges"]
        learner = service.learner(0, 40_000)
        wait_until(lambda: service.status()["merges"] > reached + 5, "the newcomer's merges")
    finally:
        learner.kill()
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "the inner optimizer begins fresh, with warm-up: no peer has one" in log


@pytest.mark.slow
def test_all_learners_killed_go_on_with_the_slots_own_optimizer_state(syncer: Callable[..., Syncer]) -> None:
    sync = {"staleness": {"maxSteps": 100_000, "maxVersions": 100_000}}
    service = syncer(sync, {"steps": 1_000_000}, 2, {"checkpoint": {"everySeconds": 0.2}})
    states = [service.folder / "state" / f"local-{ordinal}.safetensors" for ordinal in range(2)]
    learners = [service.learner(ordinal, 40_000) for ordinal in range(2)]
    try:
        wait_until(lambda: service.status()["merges"] > 5, "merges")
        wait_until(lambda: all(path.exists() for path in states), "both slots' own checkpoints")
        for learner in learners:
            learner.kill()
        for learner in learners:
            learner.wait()
        reached = service.status()["merges"]
        learners = [service.learner(ordinal, 40_000) for ordinal in range(2)]
        wait_until(lambda: min(s["incarnation"] for s in service.status()["slots"]) > 2, "both replacements")
        wait_until(lambda: service.status()["merges"] > reached + 5, "their merges")
        for learner in learners:
            learner.terminate()
        for learner in learners:
            assert learner.wait() == 0
    finally:
        for learner in learners:
            learner.kill()
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "the inner optimizer continues from the state of the slot's own checkpoint" in log
    assert "begins fresh" not in log
