"""The judge of a job's status that the chaos of tests/e2e relies on notices what is untrue, and pods that are taken."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.jobs import Job
from e2e.true_status import Look, Looks

TRUE = ("SyncerReady", "QuorumMet", "Ready", "Durable")
FALSE = ("Degraded", "Suspended", "Complete", "Failed", "Stalled")


def pod(uid: str, **more: Any) -> dict[str, Any]:
    meta = {"uid": uid, "name": f"hurt-local-{uid}", "labels": {"diloco.io/role": "learner"}, **more}
    return {"metadata": meta, "status": {"containerStatuses": [{"ready": True, "restartCount": 0}]}}


def look(**page: Any) -> Look:
    """At a job of three learners of which all is true, but for what is changed of the syncer's page."""
    status = {
        "conditions": [
            {"type": kind, "status": str(kind in TRUE), "reason": "", "message": ""} for kind in (*TRUE, *FALSE)
        ],
        "phase": "Running",
        "syncer": {"epoch": 1},
        "learners": "3/3",
        "quorum": "3/1",
        "regions": [{"ready": 3, "inQuorum": 3, "state": "Running"}],
        "progress": {"merges": 5},
    }
    slots = [{"state": "active", "ready": True}] * 3
    said = {"phase": "training", "epoch": 1, "merges": 5, "quorum": {"active": 3}, "message": "", "slots": slots}
    return Look(status, [pod("0"), pod("1"), pod("2")], objects={}, page=said | page, leads=True)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "_objects", lambda self: {})


def looks(may_go: bool = False) -> Looks:
    return Looks(Job(None, "hurt"), "", lambda uid, name: may_go)  # type: ignore[arg-type]


def test_a_status_that_lags_is_noticed_sentence_by_sentence() -> None:
    judge = looks()
    judge._judge(look(), 1.0, 1.0)
    assert not any(lag.all for lag in judge.lags().values())
    for second in (2.0, 3.0):
        judge._judge(look(epoch=2, quorum={"active": 0}, slots=[]), 1.0, second)
    judge._judge(look(), 1.0, 4.0)
    late = {name for name, lag in judge.lags().items() if lag == (2.0, 2.0)}
    assert late == {"QuorumMet", "Ready", "syncer.epoch", "learners", "quorum", "regions.inQuorum"}
    judge._judge(look(merges=4), 1.0, 5.0)
    assert judge.ahead, "more merges than the store has"


def test_a_pod_that_worked_and_goes_without_a_deed_is_noticed() -> None:
    for may_go, taken in ((False, 2), (True, 0)):
        judge = looks(may_go)
        judge._judge_pods([pod("0"), pod("1")])
        judge._judge_pods([pod("0", deletionTimestamp="now")])
        assert len(judge.taken) == taken
