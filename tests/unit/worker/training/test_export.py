"""The exported directory: transformers loads it, and it is the model that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job import DiLoCoJob, MetadataSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.training import DataSpec, EvaluationSpec, ModelSpec, TrainingSpec
from diloco_worker.training import evaluator, models
from diloco_worker.training.export import ExportError, assemble, export

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def job(config: dict[str, Any], data: DataSpec | None = None, **model: Any) -> DiLoCoJob:
    data = data or DataSpec(paths=["python-stdlib"], sequence_length=16)
    training = TrainingSpec(model=ModelSpec(config=config, **model), data=data, evaluation=EvaluationSpec(fraction=0.1))
    spec = JobSpec(training=training, regions=[RegionSpec(learners=1)])
    return DiLoCoJob(api_version="diloco.io/v1alpha1", kind="DiLoCoJob", metadata=MetadataSpec(name="a"), spec=spec)


def trained(of: DiLoCoJob) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """A model unlike any that a seed gives, and its parameters as they come from the store."""
    model = models.build(of.spec, 5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model, {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "tie_word_embeddings": True},
        {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 1, "num_local_experts": 3},
        {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2},
    ],
    ids=["llama", "tied", "mixtral", "gpt2"],
)
def test_language_models_load_with_the_same_loss(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    of = job(config)
    model, tensors = trained(of)
    export(of, tensors, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, p in loaded.named_parameters():
        assert torch.equal(p, torch.from_numpy(tensors[name])), name
    one, other = (evaluator.mean_loss(m, [text()], torch.float32) for m in (model, loaded))
    assert one == pytest.approx(other, abs=1e-6)


def test_image_classifier_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    config = {**LLAMA, "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    of = job(config, DataSpec(source="python", function="m:f"))
    model, tensors = trained(of)
    export(of, tensors, tmp_path / "out")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    pixels = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(loaded(pixels).logits, model.eval()(pixels).logits)


def test_byte_tokenizer_travels_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    of = job(LLAMA)
    export(of, trained(of)[1], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for sample in ("def f(x):\n\treturn x  # naïve – 日本 \U0001f600", "".join(map(chr, range(1, 0x250)))):
        ids = tokenizer(sample)["input_ids"]
        assert ids == list(sample.encode())
        assert tokenizer.decode(ids) == sample


def test_adapters_are_merged(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    of = job(LLAMA, lora={"rank": 2, "alpha": 4.0, "targets": ["*_proj"]})
    model, tensors = trained(of)
    assert any(name.endswith("lora_a") for name in tensors)
    export(of, tensors, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    one, other = (evaluator.mean_loss(m, [text()], torch.float32) for m in (model, loaded))
    assert one == pytest.approx(other, abs=1e-4)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    of = job(LLAMA)
    _, tensors = trained(of)
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(ExportError, match=r"missing: model\.norm\.weight"):
        assemble(of, tensors)
    with pytest.raises(ExportError, match=r"not the model's: extra"):
        assemble(of, {**tensors, "model.norm.weight": norm, "extra": norm})
    with pytest.raises(ExportError, match=r"another shape: model\.norm\.weight"):
        assemble(of, {**tensors, "model.norm.weight": norm[:-1]})
    with pytest.raises(ExportError):
        export(of, tensors, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_only_a_new_or_empty_directory_is_written(tmp_path: Path) -> None:
    of = job(LLAMA)
    _, tensors = trained(of)
    (tmp_path / "empty").mkdir()
    export(of, tensors, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    with pytest.raises(ExportError, match="exists already"):
        export(of, tensors, tmp_path / "empty")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExportError):
            export(of, tensors, out)


def test_evaluation_does_not_depend_on_how_batches_are_cut() -> None:
    model, _ = trained(job(LLAMA))
    whole = text()
    whole["labels"] = whole["labels"].clone()
    whole["labels"][0, :12] = -100
    cut = [{n: t[i : i + 1] for n, t in whole.items()} for i in range(4)]
    one, other = (evaluator.mean_loss(model, parts, torch.float32) for parts in ([whole], cut))
    assert one == pytest.approx(other, rel=1e-6)
    assert model.training


def test_evaluations_fall_due_by_tokens() -> None:
    due = evaluator.EvaluationSchedule(100)
    assert [t for t in (0, 50, 99, 100, 150, 420, 450, 500) if due.claim(t, 0.0)] == [0, 100, 420, 500]


@pytest.mark.promise("A job of any size is scored fifty times on its way to the stop, unless it sets another number")
def test_by_default_fifty_evaluations_fall_due_on_the_way_to_the_stop() -> None:
    """Whatever the job's size, and by whichever of steps, tokens and seconds it stops."""
    due = evaluator.EvaluationSchedule(EvaluationSpec().every_tokens)
    scored = [i for i in range(10_001) if due.claim(10**9 * i, i / 10_000)]
    assert len(scored) == 51 and scored[:3] == [0, 200, 400] and scored[-1] == 10_000
