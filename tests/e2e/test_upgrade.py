"""The operator is upgraded under running jobs: they keep template and image until the user's word moves both."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

from .clusters import Cluster, run, until
from .conftest import VERSION, images, install
from .jobs import Job

SECOND = f"{VERSION}-second"
# Release 2 starts learners by another command line, which only its own worker image knows; a learner that has the one
# without the other ends at once. Its other images are those of release 1 under other names.
COMMAND_BEFORE, COMMAND_AFTER = ["python", "-m", "diloco_worker"], ["python", "-m", "diloco_worker.second"]
CHANGES = {
    "operator": f"""
from pathlib import Path
import diloco_operator
home = Path(diloco_operator.__file__).parent
for name, before, after in (
    ("objects/pods.py", {json.dumps(COMMAND_BEFORE)!r}, {json.dumps(COMMAND_AFTER)!r}),
    ("model.py", 'RELEASE = version("decoupled-diloco")', 'RELEASE = "2.0.0"'),
):
    text = (home / name).read_text()
    assert text.count(before) == 1, (name, before)
    (home / name).write_text(text.replace(before, after))
""",
    "syncer": "",
    "worker": """
from pathlib import Path
import diloco_worker
program = "import runpy\\nrunpy.run_module('diloco_worker', run_name='__main__')\\n"
(Path(diloco_worker.__file__).parent / "second.py").write_text(program)
""",
}


@pytest.fixture(scope="module")
def second_release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tag of release 2's images, which the cluster has."""
    program = os.environ.get("BUILDER", str(ROOT / "tools" / "images.sh"))
    for role, change in CHANGES.items():
        folder: Path = tmp_path_factory.mktemp(f"second-{role}")
        (folder / "change.py").write_text(change)
        (folder / "Dockerfile").write_text(
            f"FROM diloco-{role}:{VERSION}\nUSER 0:0\nCOPY change.py /\nRUN python /change.py\nUSER 65532:65532\n"
        )
        run(program, "build-one", str(folder), f"diloco-{role}:{SECOND}", timeout=300)
    cluster.load([image.replace(VERSION, SECOND) for image in images()])
    return SECOND


@pytest.fixture
def upgrade(cluster: Cluster) -> Iterator[Any]:
    """``upgrade(tag, *roles)``: `helm upgrade` to images of that tag; undone at the end."""

    def act(tag: str, *roles: str) -> None:
        install(cluster, *(f"images.{role}.tag={tag}" for role in roles))

    yield act
    act(VERSION, "operator", "syncer", "worker")


def learners_templates(job: Job) -> list[tuple[list[str], str]]:
    """Command and image of the StatefulSets of the job's learners."""
    sets = job.cluster.items(f"/apis/apps/v1/namespaces/{job.namespace}/statefulsets", f"diloco.io/job={job.name}")
    containers = [one["spec"]["template"]["spec"]["containers"][0] for one in sets]
    return [(one["command"], one["image"]) for one in containers]


def everything(job: Job) -> dict[str, tuple[str, int]]:
    return job.identities() | job.identities("syncer")


@pytest.mark.timeout(400)
def test_an_operator_upgrade_restarts_no_learner(start: Any, upgrade: Any) -> None:
    job: Job = start("upgraded", learners=2)
    job.in_merges(2)
    before = everything(job)
    # Another default image for jobs to come: one that does not even exist.
    upgrade("9.9.9", "syncer", "worker")
    job.merging_on(merges=20)
    job.patch({"metadata": {"annotations": {"example.com/touched": "yes"}}})  # no new generation
    job.merging_on(merges=20)
    assert everything(job) == before
    # Also an edit keeps the images that the job started with.
    job.patch({"spec": {"failurePolicy": {"maxReplacements": 77}}})
    until("the new generation is seen", lambda: job.status()["observedGeneration"] >= 2, 60)
    job.merging_on(merges=20)
    assert everything(job) == before
    job.exact()


@pytest.mark.timeout(900)
def test_template_and_image_move_together_by_the_users_word(
    cluster: Cluster, start: Any, second_release: str, upgrade: Any
) -> None:
    """`helm upgrade` to a release with another command line for learners, then an edit: nothing rolls. Then
    `diloco upgrade`: no learner has one release's command with the other's image, at any moment."""
    first = (COMMAND_BEFORE, f"diloco-worker:{VERSION}")
    second = (COMMAND_AFTER, f"diloco-worker:{second_release}")
    job: Job = start("moved", learners=2)
    job.in_merges(2)
    before = everything(job)
    assert learners_templates(job) == [first]
    upgrade(second_release, "operator", "syncer", "worker")
    job.merging_on(merges=20)
    job.patch({"spec": {"ttlSecondsAfterFinished": 100_000}})
    until("the edit is seen", lambda: job.status()["observedGeneration"] >= 2, 60)
    until("the status names the newer release", lambda: "2.0.0" in (job.status()["release"].get("newer") or ""), 60)
    job.merging_on(merges=20)
    assert everything(job) == before, "the edit has rolled something"
    assert learners_templates(job) == [first], "the edit has moved the template"

    cluster.diloco("upgrade", job.name, "-n", job.namespace)
    seen = set()

    def moved() -> bool:
        pods = [pod["spec"]["containers"][0] for pod in job.pods("learner")]
        found = [(one["command"], one["image"]) for one in pods] + learners_templates(job)
        assert all(one in (first, second) for one in found), f"a mix of two releases: {found}"
        seen.update(image for _, image in found)
        return len(pods) == 2 and all(one == second for one in found)

    until("all learners have the second release", moved, 300)
    assert len(seen) == 2, "the rollout was not seen"
    until(
        "the syncer has it, too",
        lambda: job.syncer_pod()["spec"]["containers"][0]["image"] == f"diloco-syncer:{second_release}",
        180,
    )
    job.in_merges(2)
    job.merging_on()
    now = everything(job)
    assert not {uid for uid, _ in now.values()} & {uid for uid, _ in before.values()}
    assert not any(restarts for _, restarts in now.values()), (
        "a program has ended: one release's with the other's flags"
    )
    release = job.status()["release"]
    assert (release["operator"], release["worker"], release.get("newer")) == ("2.0.0", second[1], None)
    job.exact()
