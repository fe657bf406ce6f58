"""The plan at a job's end where ``output.uri`` is given: the model is waited for and told, and the syncer stopped."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_operator.job import read_job
from diloco_operator.model import PlanMemory
from diloco_operator.objects.pods import syncer_inputs, template_refusals
from diloco_protocol.documents import OutputRow, StatusDocument
from operator_world import World, job_object

URI = "s3://bucket/models/job"


class OutputWorld(World):
    """A world whose syncer writes an output: ``state`` says how far it is."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(job_object(**{"output": {"uri": URI}, "training": {"stop": {"tokens": 2000}}} | spec))
        self.state, self.words = "writing", ""

    def document(self) -> StatusDocument:
        document = super().document()
        uri = (self.job["spec"].get("output") or {}).get("uri")
        state = self.state if document.phase == "complete" else "waiting"
        row = OutputRow(uri=uri, state=state, size=1000 * (state == "written"), message=self.words) if uri else None
        return document.model_copy(update={"output": row})

    def _ask(self) -> None:
        super()._ask()
        if self.report is not None:  # as it was when the job ended
            self.report = self.report.model_copy(update={"output": OutputRow(uri=URI, state="waiting")})

    def end(self) -> None:
        self.until(lambda w: w.syncer.phase == "complete", 100)


@pytest.mark.promise(
    "The syncer's node is freed once the model is at `output.uri`, and never before; a failure is "
    "reported, and the model continues to be served"
)
def test_the_syncer_is_stopped_when_the_model_is_written_and_not_before() -> None:
    world = OutputWorld()
    world.end()
    world.run(120)
    assert world.truth("Complete") == "False" and "merged model to " + URI in world.condition("Ready")["message"]
    assert world.status["output"] == {"uri": URI, "state": "Writing"} and world.of("syncer")
    assert not world.of("learner"), "their nodes are not waited with"
    world.state = "written"
    world.until(lambda w: w.truth("Complete") == "True", 60)
    world.until(lambda w: not w.of("syncer"), 60)
    world.run(120)
    assert world.status["output"] == {"uri": URI, "state": "Written", "size": 1000}
    assert world.told("OutputWritten") == 1 and world.truth("Complete") == "True" and world.truth("Ready") == "True"
    assert "output" not in world.status["report"], "of when the report was made; status.output is of now"
    assert world.status["report"]["outcome"] == "complete" and world.status["phase"] == "Complete"
    world.memory = PlanMemory()  # the operator restarts
    world.run(60)
    assert not world.of("syncer") and world.told("OutputWritten") == 1


@pytest.mark.promise(
    "The syncer's node is freed once the model is at `output.uri`, and never before; a failure is "
    "reported, and the model continues to be served"
)
def test_a_model_that_could_not_be_written_stays_where_it_is_served() -> None:
    world = OutputWorld()
    world.end()
    world.state, world.words = "failed", "access denied (403); correct output.uri"
    world.until(lambda w: w.truth("Complete") == "True", 60)
    world.run(60)
    assert world.of("syncer"), "it has the model"
    assert world.condition("Degraded")["reason"] == "OutputFailed" and world.told("OutputFailed") == 1
    assert "access denied" in world.condition("Degraded")["message"]
    world.state, world.words = "written", ""
    world.edit(output={"uri": "s3://bucket/other"})
    world.until(lambda w: not w.of("syncer"), 120)
    assert world.status["output"]["uri"] == "s3://bucket/other" and world.truth("Degraded") == "False"


@pytest.mark.promise(
    "The syncer's node is freed once the model is at `output.uri`, and never before; a failure is "
    "reported, and the model continues to be served"
)
def test_a_syncer_that_is_made_anew_while_it_writes_brings_no_learner_back() -> None:
    world = OutputWorld()
    world.end()
    world.until(lambda w: (w.status.get("output") or {}).get("state") == "Writing", 60)
    world.until(lambda w: not w.of("learner"), 60)
    world.delete_pod(world.of("syncer")[0].name)
    for _ in range(60):
        world.run(1)
        assert not world.of("learner") and world.status["phase"] == "Finishing"
    world.state = "written"
    world.until(lambda w: w.truth("Complete") == "True" and not w.of("syncer"), 120)


def test_a_syncer_that_never_answers_again_is_not_waited_for_without_end() -> None:
    world = OutputWorld()
    world.end()
    world.until(lambda w: (w.status.get("output") or {}).get("state") == "Writing", 60)
    world.syncer_silent = True
    world.until(lambda w: w.truth("Complete") == "True", 900)
    assert world.of("syncer"), "the model is nowhere else"


def test_without_an_output_the_syncer_serves_on() -> None:
    world = OutputWorld(output={})
    world.end()
    world.until(lambda w: w.truth("Complete") == "True", 60)
    world.run(120)
    assert world.of("syncer") and "output" not in world.status


@pytest.mark.parametrize(
    ("uri", "mounts", "refused"),
    [
        ("/models/job", [], "mount one"),
        ("/models/job", ["/models"], ""),
        ("/modelsjob", ["/models"], "mount one"),
        ("/var/lib/diloco/output", [], ""),
        ("/var/lib/diloco", [], "the store's own place"),
        ("/var/lib/diloco/store/x", [], "the store's own place"),
        ("/models/../etc", ["/models"], "the store's own place"),
        (URI, [], ""),
    ],
)
def test_a_directory_is_on_a_volume(uri: str, mounts: list[str], refused: str) -> None:
    volumes = [{"name": f"v{i}", "mountPath": path} for i, path in enumerate(mounts)]
    template = {"spec": {"containers": [{"name": "syncer", "volumeMounts": volumes}]}}
    spec = read_job(job_object(output={"uri": uri}, syncer={"podTemplate": template})).spec
    said = [str(one) for one in template_refusals(spec)]
    assert bool(said) == bool(refused)
    for line in said:
        assert line.startswith("spec.output.uri: ") and refused in line
    bucket = read_job(job_object(output={"uri": "/var/lib/diloco/out"}, syncer={"storage": {"uri": URI}})).spec
    assert template_refusals(bucket), "with a store in a bucket that folder goes with the pod"


def test_another_place_starts_the_syncer_again() -> None:
    one, two = (read_job(job_object(output={"uri": uri})).spec for uri in (URI, URI + "2"))
    assert syncer_inputs(one) != syncer_inputs(two)
