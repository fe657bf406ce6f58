"""``python -m diloco_worker``: what is wrong is said in words, and in the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_worker import Learner
from diloco_worker import __main__ as program
from diloco_worker.settings import ConfigurationError

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
        ("WORLD_SIZE", "8"),
    ],
)
def test_wrong_environment_names_the_variable(run, name: str, value: str) -> None:
    code, said = run(**{name: value})
    assert code == 2 and name in said and value in said and "Traceback" not in said


@pytest.mark.promise("Ranks of torchrun without a process group end with a sentence that says what to call first")
@pytest.mark.parametrize("job", [{}, {"DILOCO_JOB_FILE": "job.json", "DILOCO_SYNCER": "127.0.0.1:1"}])
def test_one_of_several_ranks_needs_a_group(
    job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job and alone."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(job_to_json(parse_job(JOB.replace("PATH", "python-stdlib").replace("DEVICE", "cpu"))))
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 8, and there is no .*init_process_group\(\) before"):
        Learner.from_environment(model, optimizer, environ={"RANK": "0", "WORLD_SIZE": "8", **job})
    Learner.from_environment(model, optimizer, environ={"RANK": "0", "WORLD_SIZE": "1"})


def test_grpc_has_no_part_in_a_fork_unless_the_user_wants_it() -> None:
    """Its handlers crash the workers of a DataLoader."""
    said = "import os, diloco_worker; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    for given, expected in (({}, "0"), ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, "1")):
        env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
        assert subprocess.check_output([sys.executable, "-c", said], env=env | given, text=True).strip() == expected
