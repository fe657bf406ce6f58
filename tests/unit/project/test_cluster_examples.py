"""The example jobs for clusters are those of examples/, with nothing changed but what clusters need."""

from __future__ import annotations

import sys

import pytest

from diloco_protocol.spec.load import Problem, load_job
from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import cluster_examples as tool


def test_nothing_else_lies_there() -> None:
    files = {path.stem for path in (ROOT / "manifests" / "examples").iterdir()}
    assert files == set(tool.CHANGES) == {"tiny-gpt", "tiny-moe", "tiny-vit", "custom-loop"}


@pytest.mark.parametrize("name", sorted(tool.CHANGES))
def test_it_is_the_same_job(name: str) -> None:
    notes: list[Problem] = []
    here = load_job(ROOT / "examples" / f"{name}.yaml")
    there = load_job(ROOT / "manifests" / "examples" / f"{name}.yaml", notes=notes)
    assert notes == []
    assert here.metadata == there.metadata
    for section in ("training", "sync", "regions", "seed", "failure_policy", "node_loss"):
        assert getattr(here.spec, section) == getattr(there.spec, section), section
    assert here.spec.learners.command == there.spec.learners.command
    assert here.spec.learners.credentials == there.spec.learners.credentials
    (learner,) = there.spec.learners.pod_template["spec"]["containers"]
    (syncer,) = there.spec.syncer.pod_template["spec"]["containers"]
    assert (learner["name"], syncer["name"]) == ("learner", "syncer")
    for container in (learner, syncer):
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
    # Of the user's own image the learner's is the only one.
    assert ("image" in learner) == (name == "custom-loop") and "image" not in syncer


def test_the_image_of_the_custom_loop_is_the_one_that_its_recipe_makes() -> None:
    job = load_job(ROOT / "manifests" / "examples" / "custom-loop.yaml")
    image = job.spec.learners.pod_template["spec"]["containers"][0]["image"]
    assert image in (ROOT / "examples" / "custom-loop.Dockerfile").read_text(encoding="utf-8")


def test_an_example_that_changed_under_the_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tool.CHANGES, "tiny-gpt", tool.Change("# x\n", {"not there": ""}))
    with pytest.raises(ValueError, match=r"examples/tiny-gpt\.yaml"):
        tool.text("tiny-gpt")
