"""What the worker finds out about a job without training: figures, and what it leaves unchecked."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from diloco_protocol.spec.load import Problem, job_to_json, load_job
from diloco_worker.__main__ import main
from diloco_worker.fragments import build_layout
from diloco_worker.training import models
from diloco_worker.training.findings import VARIABLE, JobFindings
from diloco_worker.training.job_check import check_job, look_only_in_cache_if_offline
from repository import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("example", ["minimal", "tiny-gpt", "tiny-moe", "tiny-vit"])
def test_figures_are_those_of_the_model_that_learners_build(example: str) -> None:
    job = load_job(EXAMPLES / f"{example}.yaml")
    found = check_job(job.spec, EXAMPLES)
    model = models.build(job.spec, 0, directory=EXAMPLES)
    layout = build_layout(model, job.spec.sync.fragments, job.spec.sync.every)
    assert found.model is not None and not found.wrong and not found.here and not found.unchecked
    assert found.model.parameters == sum(p.numel() for p in model.parameters())
    assert found.model.fragments == tuple(layout.elements(p) for p in range(len(layout)))
    assert found.device in ("cpu", "cuda") and JobFindings.from_json(found.to_json()) == found


def test_tokens_of_a_step_are_all_learners_together() -> None:
    regions = "regions=[{name: a, learners: 2}, {name: b, learners: 1, batch: {sequences: 3, accumulation: 2}}]"
    data = "training.data={paths: [python-stdlib], sequenceLength: 16}"
    batch = "training.batch={sequences: 4}"
    tokens = 16 * (2 * 4 + 1 * 3 * 2)
    for stop, steps in (("{tokens: 10000}", -(-10000 // tokens)), ("{steps: 7}", 7), ("{seconds: 60}", None)):
        change = [regions, data, batch, f"training.stop={stop}", "training.optimizer.schedule=constant"]
        found = check_job(load_job(EXAMPLES / "minimal.yaml", change).spec)
        assert (found.step_tokens, found.steps) == (tokens, steps)


def test_of_images_each_counts_as_one() -> None:
    job = load_job(EXAMPLES / "tiny-vit.yaml")
    batch = job.spec.training.batch
    assert check_job(job.spec, EXAMPLES).step_tokens == job.spec.slots * batch.sequences * batch.accumulation


def test_frozen_matrices_are_counted_as_they_are_held() -> None:
    change = ["training.model.lora={rank: 4, targets: ['*q_proj']}", "training.model.frozenDtype=bfloat16"]
    job = load_job(EXAMPLES / "tiny-gpt.yaml", change)
    model = models.build(job.spec, 0, directory=EXAMPLES)
    found = check_job(job.spec, EXAMPLES).model
    assert found is not None and found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.bytes == sum(p.numel() * p.element_size() for p in model.parameters()) < 4 * found.parameters


def test_weights_at_a_uri_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    change = ["training.model={from: 's3://bucket/weights'}"]
    found = check_job(load_job(EXAMPLES / "minimal.yaml", change).spec)
    assert found.model is None and not found.wrong and "s3://bucket/weights" in found.unchecked[0]
    assert not list(tmp_path.iterdir())


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_worker.training.job_check.getproxies", lambda: {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    named = load_job(EXAMPLES / "minimal.yaml", ["training.data.tokenizer=gpt2"]).spec
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        look_only_in_cache_if_offline(named)
        assert not constants.HF_HUB_OFFLINE
    look_only_in_cache_if_offline(load_job(EXAMPLES / "minimal.yaml").spec)  # it names nothing there
    assert not constants.HF_HUB_OFFLINE
    look_only_in_cache_if_offline(named)
    assert constants.HF_HUB_OFFLINE
    found = check_job(named)
    assert [problem.path for problem in found.here] == ["spec.training.data.tokenizer"]


def test_a_worker_process_writes_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, written = tmp_path / "job.json", tmp_path / "findings.json"
    change = ["training.model.config.model_type=lama"]
    job.write_text(job_to_json(load_job(EXAMPLES / "minimal.yaml", change)))
    for name, value in (("DILOCO_JOB_FILE", job), ("DILOCO_JOB_DIRECTORY", tmp_path), (VARIABLE, written)):
        monkeypatch.setenv(name, str(value))
    assert main() == 0
    found = JobFindings.from_json(written.read_text())
    (problem,) = found.wrong
    assert isinstance(problem, Problem) and problem.value == "lama" and "did you mean llama" in problem.message
    assert found.model is None and json.loads(written.read_text())["model"] is None
