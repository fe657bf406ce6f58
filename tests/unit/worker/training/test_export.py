"""The exported directory: transformers loads it, and it is the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job import DiLoCoJob, MetadataSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.training import DataSpec, EvaluationSpec, ModelSpec, TrainingSpec
from diloco_worker import data
from diloco_worker.training import evaluator, export_check, models
from diloco_worker.training.export import ExportError, assemble, export
from diloco_worker.training.export_check import check_export

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


@pytest.mark.promise("An exported model generates with the cache, and stops where the model learnt that documents end")
class TestUse:
    """What was written, used as others use it."""

    @staticmethod
    def settings(out: Path, file: str = "generation_config.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((out / file).read_text())
        return found

    def test_each_token_goes_through_the_model_once(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        of = job({**LLAMA, "max_position_embeddings": 128, "use_cache": False})
        model, tensors = trained(of)
        config: Any = model.config
        assert config.use_cache is False
        export(of, tensors, tmp_path / "out")
        assert self.settings(tmp_path / "out", "config.json")["use_cache"] is True
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        widths: list[int] = []
        loaded.model.embed_tokens.register_forward_hook(lambda m, given, o: widths.append(given[0].shape[-1]))
        prompt = torch.arange(1, 65).unsqueeze(0)
        made = loaded.generate(prompt, max_new_tokens=40, do_sample=False)
        assert sum(widths) == 64 + made.shape[-1] - 64 - 1

    def test_documents_of_bytes_end_with_0(self, tmp_path: Path) -> None:
        of = job(LLAMA)
        export(of, trained(of)[1], tmp_path / "out")
        for file in ("generation_config.json", "config.json"):
            found = self.settings(tmp_path / "out", file)
            assert found["eos_token_id"] == 0 and found.get("bos_token_id") is None

    def test_special_tokens_are_the_tokenizers(self, tmp_path: Path) -> None:
        folder = tokenizer_of(
            tmp_path / "words", {"a": 0, "<end>": 5, "<pad>": 7}, eos_token="<end>", pad_token="<pad>"
        )
        of = job(LLAMA, DataSpec(paths=["x"], sequence_length=16, tokenizer=str(folder)))
        export(of, trained(of)[1], tmp_path / "out")
        for file in ("generation_config.json", "config.json"):
            found = self.settings(tmp_path / "out", file)
            assert (found["eos_token_id"], found["pad_token_id"], found.get("bos_token_id")) == (5, 7, None)

    @pytest.mark.parametrize(("ends", "told"), [([17, 18], [17, 18, 0]), (17, [17, 0]), ([0, 18], [0, 18]), (0, 0)])
    def test_settings_of_the_start_stay(self, ends: Any, told: Any, tmp_path: Path) -> None:
        start: Any = models.build(job(LLAMA).spec, 5)
        start.save_pretrained(tmp_path / "start")
        given = {"eos_token_id": ends, "temperature": 0.5, "do_sample": True, "repetition_penalty": 1.25}
        (tmp_path / "start" / "generation_config.json").write_text(json.dumps(given))
        of = job({}, from_=str(tmp_path / "start"))
        export(of, trained(of)[1], tmp_path / "out")
        found = self.settings(tmp_path / "out")
        assert {name: found[name] for name in given} == {**given, "eos_token_id": told}
        assert found["use_cache"] is True

    def test_a_check_scores_what_the_evaluator_scores(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "corpus.txt").write_text("words and words " * 1000)
        of = job(LLAMA, DataSpec(paths=["corpus.txt"], sequence_length=16))
        model, tensors = trained(of)
        export(of, tensors, tmp_path / "out")
        found = check_export(of, tmp_path / "out", directory=tmp_path, cache_directory=tmp_path / "cache")
        held_out = data.load(of.spec, held_out=True, directory=tmp_path)
        batches = evaluator.chosen(held_out, of.spec)
        assert found.loss == pytest.approx(evaluator.mean_loss(model, batches, torch.float32), abs=1e-5)
        assert found.batches == found.of == len(batches) > 1
        assert found.cached and found.generated and found.end == (0,)
        monkeypatch.setattr(export_check, "SECONDS", 0.0)
        some = check_export(of, tmp_path / "out", directory=tmp_path, cache_directory=tmp_path / "cache")
        assert (some.batches, some.of) == (1, len(batches)) and some.loss is not None
        assert check_export(of, tmp_path / "out", directory=tmp_path).why == "the run's data are not here"
        (tmp_path / "corpus.txt").unlink()
        gone = check_export(of, tmp_path / "out", directory=tmp_path, cache_directory=tmp_path / "cache")
        assert gone.loss is None and "no such file" in gone.why

    def test_a_check_tells_of_a_model_without_a_cache_and_of_one_that_cannot_be_loaded(self, tmp_path: Path) -> None:
        of = job(LLAMA)
        export(of, trained(of)[1], tmp_path / "out")
        for file in ("generation_config.json", "config.json"):
            changed = {**self.settings(tmp_path / "out", file), "use_cache": False}
            (tmp_path / "out" / file).write_text(json.dumps(changed))
        assert not check_export(of, tmp_path / "out").cached
        (tmp_path / "out" / "model.safetensors").write_bytes(b"")
        with pytest.raises(ExportError, match="was written, and it cannot be used"):
            check_export(of, tmp_path / "out")


def tokenizer_of(folder: Path, ids: dict[str, int], **special: str) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel(ids, unk_token=next(iter(ids))))
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return folder
