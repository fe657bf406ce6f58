"""What makes a run fail within its first minute is said by `diloco validate`, and by `diloco run` before its
syncer starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diloco.checks.start import StartCheck
from diloco.checks.verdict import judge_file
from diloco.console import CommandError
from diloco.main import app
from diloco.processes.launch import ForkServerClient
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import base_environment
from diloco.validate import validate_file
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json, load_job
from diloco_worker.training.findings import JobFindings
from diloco_worker.training.job_check import check_job

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a hub nor a GPU, wherever the tests run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def write_job(folder: Path, model: dict[str, Any] | None = None, **training: Any) -> Path:
    (folder / "corpus.txt").write_text("a corpus\n" * 2000)
    document = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "training": {
                "model": {"config": LLAMA, **(model or {})},
                "data": {"paths": ["corpus.txt"], "sequenceLength": 16},
                "batch": {"sequences": 4, "accumulation": 2},
                "device": "cpu",
                "stop": {"tokens": 12800},
                **training,
            },
            "sync": {"fragments": 2, "every": 4},
            "regions": [{"learners": 2}],
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def ask(job: DiLoCoJob, directory: Path) -> JobFindings:
    """The worker, in this process, which has torch loaded."""
    return check_job(job.spec, directory)


def judged(path: Path, overrides: Sequence[str] = ()) -> tuple[str, int]:
    """What `diloco validate` prints, and its exit code."""
    verdict = judge_file(path, overrides, ask)
    return verdict.text, verdict.exit_code


# ------------------------------------------------------------------ validate


@pytest.mark.parametrize(
    ("model", "training", "words"),
    [
        ({"config": {**LLAMA, "model_type": "lama"}}, {}, ("model_type", "did you mean llama")),
        ({"config": {**LLAMA, "num_hidden_layer": 2}}, {}, ("num_hidden_layer", "did you mean num_hidden_layers")),
        ({"config": {**LLAMA, "num_attention_heads": 5}}, {}, ("config", "32", "attention heads")),
        ({}, {"data": {"paths": ["corpus.txt"], "tokenizer": "gpt2"}}, ("data.tokenizer", "use `bytes`")),
        ({}, {"data": {"paths": ["corpus.txt"], "tokenizer": "./nodir"}}, ("data.tokenizer", "no such directory")),
        ({}, {"device": "cuda"}, ("training.device", "no CUDA device here")),
        ({"freeze": ["*embd*"]}, {}, ("freeze.0", "matches no parameter", "model.embed_tokens.weight")),
        ({"lora": {"rank": 2, "targets": ["*wq*"]}}, {}, ("lora.targets", "match no linear layer", "q_proj")),
        ({"config": None, "from": "./weights"}, {}, ("training.model.from", "no such directory")),
    ],
)
def test_what_makes_a_run_fail_is_no_valid_job(
    tmp_path: Path, model: dict[str, Any], training: dict[str, Any], words: tuple[str, ...]
) -> None:
    said, code = judged(write_job(tmp_path, model, **training))
    text = " ".join(said.split())
    assert code == 2 and text.startswith(f"{tmp_path / 'job.yaml'}: 1 problem "), said
    assert all(word in text for word in words), said


def test_values_are_told_to_programs_as_json(tmp_path: Path) -> None:
    verdict = validate_file(write_job(tmp_path), ["training.model.from=[llama]", "training.batch.sequences={a: 1.5}"])
    told = {one["field"]: one["value"] for one in json.loads(json.dumps(verdict.document))["problems"]}
    assert told == {"spec.training.model.from": ["llama"], "spec.training.batch.sequences": {"a": 1.5}}


def test_all_of_it_is_said_at_once(tmp_path: Path) -> None:
    model = {"config": {**LLAMA, "hiden_size": 3}}
    job = write_job(tmp_path, model, device="cuda", data={"paths": ["corpus.txt"], "tokenizer": "gpt2"})
    said, code = judged(job)
    assert code == 2 and "3 problems" in said
    assert "training.device" in said and "data.tokenizer" in said and "did you mean hidden_size" in said


def test_what_this_machine_lacks_is_a_warning_for_a_cluster(tmp_path: Path) -> None:
    job = write_job(tmp_path, device="cuda")
    cluster = ["syncer.storage.size=20Gi", "learners.command=[/opt/train]"]
    assert judged(job)[1] == 2
    said, code = judged(job, cluster)
    assert code == 0 and "a valid job" in said
    assert "warning:\n  spec.training.device" in said and "there is no program /opt/train" in said


def test_data_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    said, code = judged(write_job(tmp_path, data={"paths": ["absent.txt"]}))
    assert code == 0 and "warning:" in said and "there is no such file" in said
    assert "a valid job, which `diloco run` would not start on this machine (see the warnings)" in said


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for command, words in (
        ("[python, train.py]", "there is no train.py"),
        ("[no-such]", "there is no program no-such"),
    ):
        said, code = judged(job, [f"learners.command={command}"])
        assert code == 2 and words in said and "spec.learners.command" in said


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["train.py", "random.py"], "random.py in"),
        (["train.py", "torch/__init__.py", "types.py"], "torch/, types.py in"),
        (["train.py", "yaml.py"], "yaml.py in"),  # which the program imports
        (["train.py", "typer.py", "helpers.py", "test.py", "notes/__init__.py"], ""),
    ],
)
def test_a_file_that_hides_an_installed_module_is_named(tmp_path: Path, files: list[str], named: str) -> None:
    job = write_job(tmp_path)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import yaml.nodes\nfrom helpers import x\nfrom . import typer\n")
    said, _ = judged(job, ["learners.command=[python, train.py]"])
    assert ("would be imported instead" in said) is bool(named) and named in said


def test_sizes_and_what_is_to_come(tmp_path: Path) -> None:
    said, code = judged(write_job(tmp_path))
    assert code == 0
    # 256·32 twice, and two layers of 4·32² + 3·32·64 + 2·32, and the last norm
    parameters = 2 * 256 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert f"  parameters {parameters:,} (148 kB float32); per learner about " in said and "syncer about " in said
    assert (
        "50 steps of each learner, if they are equally fast, 12,800 tokens; 256 tokens in a step of every learner"
        in said
    )


def test_the_same_for_programs(tmp_path: Path) -> None:
    document = json.loads(json.dumps(judge_file(write_job(tmp_path), (), ask).document))
    assert document["valid"] and document["job"] == "tiny" and document["problems"] == []
    assert document["trained_parameters"] == document["parameters"] > 0 and document["steps"] == 50
    path = write_job(tmp_path, {"config": {**LLAMA, "hiden_size": 3}})
    document = judge_file(path, ["sync.quorum=9"], ask).document
    assert not document["valid"] and document["job"] is None and document["source"] == str(path)
    done = CliRunner().invoke(app, ["validate", "-f", str(path), "--file-only", "--json", "--set", "sync.quorum=9"])
    assert done.exit_code == 2
    problem = json.loads(done.stdout)["problems"][0]
    assert problem["field"] == "spec.sync.quorum" and problem["value"] == 9 and "learners" in problem["message"]


def test_a_model_far_beyond_this_machine_takes_no_memory_and_is_warned_of(tmp_path: Path) -> None:
    said, code = judged(write_job(tmp_path, {"config": LARGE}))
    assert code == 0 and "parameters 70,553,706,496 (282 GB float32)" in said
    warning = " ".join(said.partition("warning:")[2].split())
    assert "TB of memory (" in warning and "`diloco run` does not start it here" in warning


@pytest.mark.slow
def test_the_command_asks_a_process_that_loads_torch(tmp_path: Path) -> None:
    job = write_job(tmp_path, {"config": {**LLAMA, "model_type": "lama"}})
    result = CliRunner().invoke(app, ["validate", str(job)])
    assert result.exit_code == 2 and "did you mean llama" in result.output
    result = CliRunner().invoke(app, ["validate", str(job), "--file-only"])
    assert result.exit_code == 0 and "a valid job" in result.output


# ------------------------------------------------------------------ run


def diloco_run(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco.main", "run", str(job), "--workdir", str(job.parent / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_run_is_refused_before_its_syncer_starts(tmp_path: Path) -> None:
    done = diloco_run(write_job(tmp_path, {"config": {**LLAMA, "num_hidden_layer": 2}}))
    assert done.returncode == 2, done
    assert "did you mean num_hidden_layers" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists(), "what never began leaves nothing"
    assert "outcome" not in done.stdout and "waiting" not in done.stdout


def test_a_run_without_its_data_or_program_is_refused_at_once(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for change, words in (
        ("training.data.paths=[absent.txt]", "there is no such file"),
        ("learners.command=[python, train.py]", "there is no train.py"),
    ):
        done = diloco_run(job, "--set", change)
        assert done.returncode == 2 and words in done.stderr, done
        assert not done.stdout and not (tmp_path / "run").exists(), "what never began leaves nothing"


@pytest.mark.slow
def test_the_fork_server_is_asked_and_what_cannot_fit_needs_force(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path / "run")
    workdir.logs.mkdir(parents=True)
    said: list[str] = []

    async def check(file: Path, force: bool) -> None:
        job = load_job(file)
        workdir.job.write_text(job_to_json(job))
        await StartCheck(job, file, workdir, force, tell=said.append).check(server)

    async def refusal(file: Path, force: bool = False) -> str:
        with pytest.raises(CommandError) as caught:
            await check(file, force)
        assert caught.value.code == 2
        return str(caught.value)

    async def main() -> None:
        try:
            large = write_job(tmp_path, {"config": LARGE})
            text = await refusal(large)
            assert "TB of memory (" in text and "are free on this machine" in text
            assert text.endswith("--force starts it anyway")
            await check(large, force=True)
            assert "1 problem" in await refusal(write_job(tmp_path, {"freeze": ["*embd*"]}), force=True)
            await check(write_job(tmp_path), force=False)
        finally:
            await server.close()

    server = ForkServerClient(base_environment(os.environ, 1), tmp_path, tmp_path / "log")
    asyncio.run(main())
    assert said[-2].startswith("parameters ")
    assert said[-1].startswith("to come: ") and " tokens in a step of " in said[-1], "as validate says it"
