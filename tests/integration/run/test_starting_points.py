"""Jobs that start from given weights, whole, frozen in part or with adapters; and what a run exports.

Each goes through ``diloco run`` and ``diloco export``, and transformers loads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, check_ledger
from typer.testing import CliRunner

from diloco.main import app
from diloco_protocol.spec.load import job_from_json
from diloco_worker import data
from diloco_worker.training import evaluator

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: start}}
spec:
  training:
    model: {{from: weights{model}}}
    data: {{source: text, paths: [corpus.txt], sequenceLength: 32}}
    batch: {{sequences: 4}}
    optimizer: {{lr: 0.01, warmupSteps: 5}}
    device: cpu
    stop: {{steps: 60}}
    evaluation: {{fraction: 0.05, everyTokens: 20000, batches: 2}}
  sync: {{fragments: 4, every: 8, overlap: 1, merge: {{method: rda}}, outer: {{optimizer: sgd, lr: 1.0}},
         compression: {{down: {down}}}}}
  regions: [{{learners: 2}}]
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A model in ``weights`` beside the job, as save_pretrained leaves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "weights")
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def held_out_loss(run: Run, directory: Path) -> float:
    """The mean loss of the exported model in ``directory`` on what the job's evaluator scores."""
    from transformers import AutoModelForCausalLM

    job = job_from_json((run.workdir / "job.json").read_bytes())
    held_out = data.load(job.spec, held_out=True, directory=run.workdir.parent)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    return evaluator.mean_loss(model, evaluator.chosen(held_out, job.spec), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "trained", "down"),
    [
        ("", [""], "float32"),
        (', freeze: ["*embed*", "*layers.0.*"]', ["layers.1.", "model.norm.weight", "lm_head"], "bfloat16"),
        (', lora: {rank: 4, alpha: 8, targets: ["*q_proj", "*v_proj"]}', ["q_proj", "v_proj"], "bfloat16"),
    ],
    ids=["whole", "frozen", "lora"],
)
def test_from_given_weights(
    start: Callable[..., Run], tmp_path: Path, given: dict[str, torch.Tensor], model: str, trained: list[str], down: str
) -> None:
    from transformers import AutoModelForCausalLM

    run = start(text=JOB.format(model=model, down=down))
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete"
    check_ledger(report)
    # It starts from these weights, learns, and what is exported is what was evaluated.
    # The evaluator has what learners have: the merged model as it is broadcast.
    rounding = {"float32": 1e-5, "bfloat16": 3e-3}[down]
    assert report["initial_loss"] == pytest.approx(held_out_loss(run, tmp_path / "weights"), abs=rounding)
    assert report["final_loss"] < report["initial_loss"] - 0.3
    done = CliRunner().invoke(app, ["export", str(run.workdir), str(tmp_path / "out")])  # torch is loaded here already
    assert done.exit_code == 0, done.output
    assert held_out_loss(run, tmp_path / "out") == pytest.approx(report["final_loss"], abs=rounding)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = dict(exported.named_parameters())
    assert names.keys() == given.keys()
    for name, parameter in names.items():
        moved = not torch.equal(parameter, given[name])
        assert moved == any(part in name for part in trained), name
