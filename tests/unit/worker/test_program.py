"""``python -m diloco_worker``: what is wrong is said in words, and in the exit code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_worker import __main__ as program

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: a}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                     num_attention_heads: 2}}
    data: {paths: [PATH], sequenceLength: 16}
    device: DEVICE
  regions: [{learners: 1}]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    for name in [n for n in os.environ if n.startswith("DILOCO_")]:
        monkeypatch.delenv(name)

    def run(path: str = "python-stdlib", device: str = "cpu", **env: str) -> tuple[int, str]:
        file = tmp_path / "job.json"
        file.write_text(job_to_json(parse_job(JOB.replace("PATH", path).replace("DEVICE", device))))
        settings = {"DILOCO_JOB_FILE": str(file), "DILOCO_SYNCER": "127.0.0.1:1", **env}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        code = program.main()
        return code, capfd.readouterr().err

    return run


@pytest.mark.parametrize("role", ["learner", "evaluator"])
def test_missing_data_is_one_line(run, role: str) -> None:
    code, said = run(path="/no/such/file.txt", DILOCO_ROLE=role)
    assert code == 2
    assert 'spec.training.data.paths.0 = "/no/such/file.txt": there is no such file or directory' in said
    assert "Traceback" not in said


def test_cuda_where_there_is_none(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, said = run(device="cuda")
    assert code == 2 and "spec.training.device" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DILOCO_LOG_LEVEL", "LOUD"),
        ("DILOCO_ROLE", "king"),
        ("DILOCO_THREADS", "many"),
        ("DILOCO_JOB_FILE", "/no/such/job.json"),
    ],
)
def test_wrong_environment_names_the_variable(run, name: str, value: str) -> None:
    code, said = run(**{name: value})
    assert code == 2 and name in said and value in said and "Traceback" not in said
