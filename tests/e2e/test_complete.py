"""1. Apply to Complete; the export loads in transformers; status.report is report.json's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol.spec.load import load_manifest
from repository import ROOT

from .clusters import Cluster, until
from .jobs import Job


def scalars(report: dict[str, Any]) -> dict[str, Any]:
    """What of report.json the status keeps: no lists, and of objects the numbers. (An empty text counts as absent.)"""
    return {key: value for key, value in report.items() if not isinstance(value, list)}


@pytest.mark.promise(
    "The example of the manifests trains in pods to its end, and the exported model has the loss that the report shows"
)
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.ci), 2])
@pytest.mark.timeout(900)
def test_the_example_trains_to_its_end(cluster: Cluster, namespace: str, tmp_path: Path, shards: int) -> None:
    _, document = load_manifest(ROOT / "manifests" / "examples" / "tiny-gpt.yaml")
    # Training ends when all learners were in merges and the evaluator has scored, however late each of them came.
    document["spec"]["training"]["stop"] = {"tokens": 10**9}
    document["spec"]["training"]["evaluation"]["everyTokens"] = 60_000
    document["spec"]["sync"]["quorum"] = 3
    document["spec"].setdefault("syncer", {})["shards"] = shards
    name = document["metadata"]["name"]
    job = Job(cluster, name, namespace)
    job.apply(document)
    job.in_merges(3)
    # The first row is that of version 0.
    scored = job.wait_training("the evaluator has scored on the way", lambda d: len(d["eval_loss"]) >= 3, 180)
    rows = scored["shards"]
    assert [(row["shard"], row["serving"], row["failures"]) for row in rows] == (
        [] if shards == 1 else [(shard, True, 0) for shard in range(shards)]
    )
    assert all(row["fragments"] and row["cpu_seconds"] > 0 for row in rows)
    stop = max(scored["tokens"]["trained"], 60_000) + 100_000
    job.patch({"spec": {"training": {"stop": {"tokens": stop}}}})
    job.wait_condition("Complete", timeout=500)
    status = job.status()
    assert status["phase"] == "Complete"
    assert status["completionTime"] > status["startTime"]

    report = json.loads(cluster.diloco("report", name, "-n", namespace, "--json"))
    assert report["outcome"] == "complete"
    assert report["tokens"]["trained"] >= stop
    assert [row["slot"] for row in report["learners"] if row["merged_pushes"]] == [0, 1, 2], report["learners"]
    assert len(report["eval_loss"]) > len(scored["eval_loss"]), "the end was scored, beside what was on the way"
    wanted = scalars(report)
    for key, value in status["report"].items():
        assert value == wanted[key], key
    missing = {key for key, value in wanted.items() if value not in (None, "")} - set(status["report"])
    assert not missing, missing
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == report["tokens"]["trained"]
    # The evaluator's figures, from a pod of its own: it learned something.
    assert report["final_loss"] < report["initial_loss"] - 1.0

    # Learners and evaluator are gone, the syncer stays and serves the model.
    until("no learner left", lambda: not job.pods("learner") and not job.pods("evaluator"), 60)
    out = tmp_path / "model"
    cluster.diloco("export", name, str(out), "-n", namespace, timeout=180)
    assert abs(held_out_loss(out, document) - report["final_loss"]) < 0.02


def held_out_loss(model: Path, document: dict[str, Any]) -> float:
    """The exported model's loss on the evaluator's own batches, in transformers."""
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    length = document["spec"]["training"]["data"]["sequenceLength"]
    from diloco_protocol.spec.load import parse_job
    from diloco_worker import data

    job = parse_job(json.dumps(document), source="job.json")
    spec = job.spec
    held_out = data.load(spec, held_out=True)
    assert spec.training.evaluation is not None
    count = spec.training.evaluation.batches * spec.training.batch.sequences
    picked = [held_out[i * len(held_out) // count] for i in range(count)]
    total = 0.0
    with torch.no_grad():
        for item in picked:
            ids = item["input_ids"].long().unsqueeze(0)
            assert ids.shape[1] == length
            logits = loaded(ids).logits[:, :-1]
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    return total / count


def shown(job: Job) -> dict[str, str]:
    """The job's row of `kubectl get dj`, by column."""
    head, row = job.cluster.kubectl("get", "dj", job.name, "-n", job.namespace).splitlines()
    return dict(zip(head.split(), row.split(), strict=True))


def test_what_people_see(cluster: Cluster, start: Any) -> None:
    """kubectl get, wait, describe as the README says them."""
    job: Job = start("shown", learners=2)
    job.in_merges(2)
    until(
        "the table tells of both",
        lambda: (row := shown(job))["LEARNERS"] == "2/2" and row["QUORUM"] == "2/1" and row["PHASE"] == "Running",
        30,
    )
    columns = ["NAME", "PHASE", "LEARNERS", "QUORUM", "STEP", "TOKENS", "PERCENT", "LOSS", "GOODPUT", "AGE"]
    assert list(shown(job)) == columns
    # It ends when all of this was seen, however long that took.
    stop = max(job.training()["tokens"]["trained"], 800_000) + 200_000
    job.patch({"spec": {"training": {"stop": {"tokens": stop}}}})
    cluster.kubectl(
        "wait", "--for=condition=Complete", "--timeout=5m", "dilocojob/shown", "-n", job.namespace, timeout=320
    )
    row = shown(job)
    assert row["NAME"] == "shown" and row["PHASE"] == "Complete"
    assert int(row["TOKENS"]) >= stop and int(row["STEP"]) > 0
    assert 0 < float(row["LOSS"]) < 5.6 and 0 < float(row["GOODPUT"]) <= 1  # ln 256 is 5.5
    told = cluster.kubectl("describe", "dilocojob", "shown", "-n", job.namespace)
    for word in ("Complete", "Events:", "Started"):
        assert word in told, told[-3000:]
