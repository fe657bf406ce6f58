"""The evaluator over a real observer and a small model, whose syncer is a script of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker import Observer
from diloco_worker.fragments import Vector
from diloco_worker.net.inbox import Downloaded, PhaseChanged
from diloco_worker.settings import WorkerSettings
from diloco_worker.training import evaluator, models

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: a}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                     num_attention_heads: 2}}
    data: {paths: [python-stdlib], sequenceLength: 16}
    device: cpu
    evaluation: {fraction: 0.1, everyTokens: 1000000}
  sync: {fragments: 1}
  regions: [{learners: 1}]
"""


class Evaluation:
    """An evaluator, and what its syncer tells it, one message after another. ``reports``: what it has reported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "job.json").write_text(job_to_json(parse_job(JOB)))
        environ = {"DILOCO_JOB_FILE": str(folder / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
        settings = WorkerSettings.from_environment(
            {**environ, "DILOCO_ROLE": "evaluator", "DILOCO_WORKDIR": str(folder)}
        )
        self.model = models.build(settings.job.spec, 1)
        self.observer = Observer(settings, self.model)
        ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
        batches = [{"input_ids": ids, "labels": ids}]
        self._evaluator = evaluator._Evaluator(settings, self.model, batches, torch.float32)
        self.reports: list[dict[str, Any]] = []
        self.loss = lambda: evaluator.mean_loss(self.model, batches, torch.float32)
        report = self.observer.report

        def record(loss: float, **what: Any) -> None:
            self.reports.append({"loss": loss, "job_tokens": self.observer.job_tokens, **what})
            report(loss, **what)

        monkeypatch.setattr(self.observer, "report", record)
        monkeypatch.setattr(evaluator, "AGAIN_SECONDS", -1.0)  # a score that stands is told again at every look

    def merge(self, number: int, tokens: int) -> None:
        """A version whose model is no other version's comes."""
        payload = Payload("float32", 4, 1)
        announced = Announcement(
            0, 1, number, payload, merged_sequence=0, merged_version=0, job_tokens=tokens, progress=0.0
        )
        values = np.random.default_rng(number).standard_normal(self.observer.layout.elements(0)) * 0.1
        self.observer._inbox.put(announced)
        self.observer._inbox.put(Downloaded(announced, Vector.from_array(values.astype(np.float32))))

    def phase(self, name: JobPhase) -> None:
        self.observer._inbox.put(PhaseChanged(name, ""))

    def follow(self, script: Iterator[None], monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the evaluator look once after each step of ``script``, and end with it."""

        def look(timeout: float) -> bool:
            if next(script, True):
                self.phase(JobPhase.COMPLETE)
            return self.observer.poll()

        monkeypatch.setattr(self.observer, "wait_for_change", look)
        self._evaluator._follow(self.observer, 9.0)

    @property
    def final(self) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["final"]]


@pytest.mark.promise("A job that trains again after its end is scored again")
@pytest.mark.parametrize("seen", [True, False])
def test_a_job_that_trains_again_after_its_end_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A syncer with a later stop replaces one whose job was at its end. ``seen``: the evaluator looked meanwhile."""
    one = Evaluation(tmp_path, monkeypatch)
    losses: list[float] = []

    def script() -> Iterator[None]:
        one.merge(1, 100)
        one.phase(JobPhase.EVALUATING)
        yield
        losses.append(one.loss())
        yield
        one.phase(JobPhase.TRAINING)
        if seen:
            yield
        one.merge(2, 200)
        one.phase(JobPhase.EVALUATING)
        yield
        losses.append(one.loss())
        yield

    one.follow(script(), monkeypatch)
    assert losses[0] != losses[1]
    said = [(report["loss"], report["job_tokens"]) for report in one.final]
    assert said == [(losses[0], 100)] * 2 + [(losses[1], 200)] * 2


def test_a_model_that_stays_is_scored_once_at_the_end_and_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer that restarted has not heard the score, and the score may have taken minutes."""
    one = Evaluation(tmp_path, monkeypatch)
    scores: list[float] = []
    score = evaluator.mean_loss

    def count(*words: Any) -> float:
        scores.append(score(*words))
        return scores[-1]

    monkeypatch.setattr(evaluator, "mean_loss", count)

    def script() -> Iterator[None]:
        one.merge(1, 100)
        one.phase(JobPhase.EVALUATING)
        yield
        yield
        one.phase(JobPhase.EVALUATING)
        yield
        assert len(scores) == 1

    one.follow(script(), monkeypatch)
    assert [report["loss"] for report in one.final] == scores[:1] * 3
