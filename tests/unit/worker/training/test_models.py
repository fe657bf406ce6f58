"""The job's model: construction, weights to start from, freezing, adapters, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError
from diloco_protocol.spec.training import DataSpec, EvaluationSpec, LoraSpec, ModelSpec, TrainingSpec
from diloco_worker import device
from diloco_worker.training import models, trainer
from diloco_worker.training.lora import LoraLinear, merge

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 1, "num_local_experts": 4}
VIT: dict[str, Any] = {
    **LLAMA,
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 3,
}


def spec(config: dict[str, Any] | None = None, data: DataSpec | None = None, **model: Any) -> JobSpec:
    if data is None:
        data = DataSpec(paths=["python-stdlib"], sequence_length=16)
    training = TrainingSpec(model=ModelSpec(config=config, **model), data=data, evaluation=EvaluationSpec(fraction=0.1))
    return JobSpec(training=training, regions=[RegionSpec(learners=1)])


IMAGES = DataSpec(source="python", function="module:load")


def tokens(sequences: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def problem(config: dict[str, Any] | None = None, **model: Any) -> str:
    with pytest.raises(JobError) as caught:
        models.build(spec(config, **model), 0)
    return str(caught.value)


def test_same_seed_same_model_whatever_ran_before() -> None:
    torch.manual_seed(123)
    one = models.build(spec(LLAMA), 7)
    torch.rand(1000)
    before = torch.random.get_rng_state()
    two = models.build(spec(LLAMA), 7)
    assert torch.equal(before, torch.random.get_rng_state())
    other = models.build(spec(LLAMA), 8)
    parameters = dict(two.named_parameters())
    assert all(torch.equal(p, parameters[n]) for n, p in one.named_parameters())
    assert not all(torch.equal(p, parameters[n]) for n, p in other.named_parameters())
    assert {p.dtype for p in one.parameters()} == {torch.float32}


def test_vocabulary_follows_the_tokenizer() -> None:
    model = models.build(spec(LLAMA), 0)
    assert model.config.vocab_size == 256
    assert model.config.eos_token_id is None or model.config.eos_token_id < 256
    assert models.build(spec({**LLAMA, "vocab_size": 300}), 0).config.vocab_size == 300


def test_loss_is_the_mean_cross_entropy_of_the_shifted_labels() -> None:
    model = models.build(spec(LLAMA), 0)
    batch = tokens()
    found = models.loss(model, batch)
    logits = model(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 256), batch["labels"][:, 1:].reshape(-1))
    assert models.predictions(batch) == 2 * 15
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(found.nats, expected.detach())


def test_masked_labels_are_no_predictions() -> None:
    batch = tokens()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :5] = -100
    assert models.predictions(batch) == 2 * 15 - 4


def test_mixture_of_experts_trains_its_router_and_reports_plain_cross_entropy() -> None:
    model = models.build(spec(MIXTRAL), 0)
    batch = tokens()
    found = models.loss(model, batch)
    assert found.value > found.nats
    outputs = model(**batch)
    expected = outputs.loss - model.config.router_aux_loss_coef * outputs.aux_loss
    torch.testing.assert_close(found.nats, expected.detach())
    found.value.backward()
    gates = [p.grad for n, p in model.named_parameters() if "gate.weight" in n]
    assert gates and all(g is not None and g.abs().sum() > 0 for g in gates)


def test_vision_transformer_classifies() -> None:
    model = models.build(spec(VIT, data=IMAGES), 0)
    batch = {"pixel_values": torch.randn(5, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 0, 1])}
    models.check_batch(model, batch, "python")
    found = models.loss(model, batch)
    assert models.predictions(batch) == 5
    assert found.nats.item() == pytest.approx(float(torch.log(torch.tensor(3.0))), abs=0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, ("config.model_type", "did you mean llama")),
        ({"model_type": "t5"}, ("config.model_type", "causal language model")),
        ({"hiden_size": 3}, ("config.hiden_size", "did you mean hidden_size")),
        ({"hidden_size": "abc"}, ("config.hidden_size", "expected int")),
        ({"hidden_size": 33}, ("config", "33", "attention heads")),
        ({"num_hidden_layers": -1}, ("config.num_hidden_layers", "at least 1")),
        ({"hidden_act": "gellu"}, ("config.hidden_act", "gellu")),
        ({"dtype": "float16"}, ("config.dtype", "training.precision")),
        ({"vocab_size": 100}, ("config.vocab_size", "256")),
        ({"max_position_embeddings": 8}, ("config.max_position_embeddings", "sequenceLength = 16")),
    ],
)
def test_wrong_configuration_names_the_field(change: dict[str, Any], words: tuple[str, ...]) -> None:
    found = problem({**LLAMA, **change})
    assert found.startswith("spec.training.model.config")
    for word in words:
        assert word in found


def test_all_unknown_fields_are_named_at_once() -> None:
    found = problem({**LLAMA, "hiden_size": 3, "num_layers": 2})
    assert "hiden_size" in found and "num_layers" in found


def test_image_model_on_text_is_refused() -> None:
    found = problem(VIT)
    assert "takes no text" in found


def test_items_that_the_model_does_not_take_are_refused() -> None:
    model = models.build(spec(LLAMA), 0)
    with pytest.raises(JobError, match="gives pixel_values"):
        models.check_batch(model, {"pixel_values": torch.zeros(1), "labels": torch.zeros(1)}, "python")
    with pytest.raises(JobError, match="no labels"):
        models.check_batch(model, {"input_ids": torch.zeros(1, 1)}, "python")


def test_freeze_by_pattern() -> None:
    model = models.build(spec(LLAMA, freeze=["model.embed_tokens.*", "*.0.mlp.*"]), 0)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert "model.embed_tokens.weight" in frozen
    assert len(frozen) == 4
    assert "matches no parameter" in problem(LLAMA, freeze=["nothing*"])
    assert "nothing is left" in problem(LLAMA, freeze=["*"])


class TestLora:
    LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["*q_proj", "*v_proj"]}  # noqa: RUF012

    def test_starts_as_the_model_and_trains_adapters_alone(self) -> None:
        plain = models.build(spec(LLAMA), 3)
        adapted = models.build(spec(LLAMA, lora=models.ModelSpec(config=LLAMA, lora=self.LORA).lora), 3)
        batch = tokens()
        torch.testing.assert_close(models.loss(adapted, batch).nats, models.loss(plain, batch).nats)
        trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * 2 * 2 and all(n.endswith((".lora_a", ".lora_b")) for n in trained)
        names = {n for n, _ in plain.named_parameters()}
        assert names <= {n for n, _ in adapted.named_parameters()}

    def test_merged_layers_compute_the_same(self) -> None:
        model = models.build(spec(LLAMA, lora=models.ModelSpec(config=LLAMA, lora=self.LORA).lora), 3)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("lora_b"):
                    p.normal_(std=0.1)
        batch = tokens()
        before = model(**batch).logits
        merge(model)
        assert not any(isinstance(m, LoraLinear) for m in model.modules())
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-5)

    def test_targets_that_match_nothing(self) -> None:
        lora = models.ModelSpec(config=LLAMA, lora={**self.LORA, "targets": ["*.wq"]}).lora
        found = problem(LLAMA, lora=lora)
        assert "lora.targets" in found and "q_proj" in found


class TestFrom:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        model: Any = models.build(spec(LLAMA), 11)
        model.save_pretrained(tmp_path / "weights")
        return tmp_path / "weights"

    def test_directory(self, saved: Path) -> None:
        source = dict(models.build(spec(LLAMA), 11).named_parameters())
        absolute = models.build(spec(from_=str(saved)), 0)
        relative = models.build(spec(from_="weights"), 0, directory=saved.parent)
        for model in (absolute, relative):
            assert model.training
            assert all(torch.equal(p, source[n]) for n, p in model.named_parameters())

    def test_uri(self, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DILOCO_WORKDIR", str(tmp_path / "work"))
        source = dict(models.build(spec(LLAMA), 11).named_parameters())
        for _ in range(2):  # copied, then found in the cache
            model = models.build(spec(from_=f"file://{saved}"), 0)
            assert all(torch.equal(p, source[n]) for n, p in model.named_parameters())
        assert [p.name.split("-")[0] for p in (tmp_path / "work" / "cache").iterdir()] == ["weights"]

    def test_configuration_beside_it(self, saved: Path) -> None:
        model = models.build(spec({"attention_dropout": 0.5}, from_=str(saved)), 0)
        assert model.config.attention_dropout == 0.5
        assert "llama" in problem({"model_type": "gpt2"}, from_=str(saved))
        assert "did you mean" in problem({"attention_dropuot": 0.5}, from_=str(saved))

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "no such directory" in problem(from_=str(tmp_path / "nowhere"))
        (tmp_path / "empty").mkdir()
        assert "training.model.from" in problem(from_=str(tmp_path / "empty"))
        assert "training.model.from" in problem(from_=f"file://{tmp_path}/empty")

    def test_pickled_weights_are_not_loaded(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        torch.save(models.build(spec(LLAMA), 11).state_dict(), saved / "pytorch_model.bin")
        assert "safetensors" in problem(from_=str(saved))

    def test_a_damaged_file(self, saved: Path) -> None:
        (saved / "model.safetensors").write_bytes(b"")
        assert "training.model.from" in problem(from_=str(saved))

    def test_weights_that_do_not_fit(self, saved: Path) -> None:
        assert "training.model.from" in problem({"hidden_size": 64}, from_=str(saved))


RESNET: dict[str, Any] = {"model_type": "resnet", "num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16]}


@pytest.mark.promise("A model with running statistics (BatchNorm), which cannot be merged, is refused by name")
def test_a_model_with_running_statistics_is_refused() -> None:
    config = {**RESNET, "depths": [1, 1], "num_labels": 3}
    with pytest.raises(JobError, match=r"model_type.*resnet.*keeps running statistics .*are not merged"):
        models.build(spec(config, IMAGES), 0)
    with pytest.raises(JobError, match="running statistics"):
        models.outline(spec(config, IMAGES))


@pytest.mark.promise(
    "Frozen matrices in bfloat16 need half of the memory, and the parameters trained beside them train as before"
)
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL])
def test_frozen_matrices_in_bfloat16_halve_their_memory_and_train_as_before(config: dict[str, Any]) -> None:
    """Adapters stay float32 and get the gradients that they get beside a float32 base, to bfloat16's precision."""
    grads = []
    for dtype in ("float32", "bfloat16"):
        job = spec(config, lora=LoraSpec(rank=2), frozen_dtype=dtype)
        model = models.build(job, 0)
        assert device.precision(job, torch.device("cpu")) == getattr(torch, dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_b"):
                    parameter.fill_(0.01)
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        halved = {n for n, p in frozen.items() if p.dtype == torch.bfloat16}
        assert halved == (
            {n for n, p in frozen.items() if p.ndim > 1 and "embed" not in n} if dtype != "float32" else set()
        )
        with device.autocast(torch.device("cpu"), torch.bfloat16):
            models.loss(model, tokens()).value.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in trained)
        grads.append(torch.cat([p.grad.ravel() for p in trained]))
    torch.testing.assert_close(grads[0], grads[1], rtol=0.1, atol=0.05 * float(grads[0].abs().max()))


@pytest.mark.promise("Weights and data from Hugging Face have the revision that the job names")
def test_a_revision_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked = []

    def refuse(name: str, **options: Any) -> None:
        asked.append((name, options["revision"]))
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    for revision in (None, "5f0b02c75b"):
        assert "no network" in problem(from_="org/name", revision=revision)
    assert asked == [("org/name", "main"), ("org/name", "5f0b02c75b")]


@pytest.mark.promise(
    "A checkpoint whose tensors are missing, or of another shape, is refused by name before training begins"
)
class TestCheckpoint:
    """Weights to start from whose tensors are not the model's."""

    @pytest.fixture
    def save(self, tmp_path: Path) -> Any:
        """Writes a checkpoint of LLAMA whose tensors went through a function, and returns its directory."""
        model: Any = models.build(spec(LLAMA), 11)
        model.save_pretrained(tmp_path)
        whole = load_file(tmp_path / "model.safetensors")

        def write(change: Any) -> str:
            save_file(change(whole), tmp_path / "model.safetensors", {"format": "pt"})
            return str(tmp_path)

        return write

    def refusals(self, config: dict[str, Any] | None, **model: Any) -> list[str]:
        """What a learner says, and what is said from the headers alone."""
        job = spec(config, **model)
        with pytest.raises(JobError) as of_headers:
            models.check_start(job, models.outline(job))
        said = [problem(config, **model), str(of_headers.value)]
        assert said[0] == said[1]
        return said

    def test_names_under_a_prefix(self, save: Any) -> None:
        source = save(lambda whole: {f"_orig_mod.{name}": t for name, t in whole.items()})
        for said in self.refusals(None, from_=source):
            assert "training.model.from" in said and "21 tensors are missing: lm_head.weight" in said
            assert "begin with `_orig_mod.`" in said and "initialise" not in said

    def test_missing_ones(self, save: Any) -> None:
        source = save(lambda whole: {n: t for n, t in whole.items() if ".1.mlp" not in n})
        for said in self.refusals(None, from_=source):
            assert "3 tensors are missing: model.layers.1.mlp.down_proj.weight" in said
            assert "training.model.initialise" in said
        allowed = spec(None, from_=source, initialise=["model.layers.1.mlp.*"])
        assert models.check_start(allowed, models.outline(allowed)) is None
        one, two = (dict(models.build(allowed, seed).named_parameters()) for seed in (0, 1))
        differing = {name for name in one if not torch.equal(one[name], two[name])}
        assert differing == {n for n in one if ".1.mlp" in n}  # by the seed, and nothing else

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({"num_hidden_layers": 3}, "9 tensors are missing"),
            ({"hidden_size": 64}, "lm_head.weight (256 x 32 there, 256 x 64 in the model)"),
            ({"vocab_size": 300}, "2 tensors are of another shape"),
        ],
    )
    def test_a_configuration_that_asks_for_more(self, save: Any, config: dict[str, Any], named: str) -> None:
        source = save(lambda whole: whole)
        assert all(named in said for said in self.refusals(config, from_=source))

    def test_another_shape_may_be_meant(self, save: Any) -> None:
        source = save(lambda whole: whole)
        new = ["lm_head.weight", "model.embed_tokens.weight"]
        allowed = spec({"vocab_size": 300}, from_=source, initialise=new)
        assert models.build(allowed, 0).config.vocab_size == 300
        assert "initialise.0" in problem({"vocab_size": 300}, from_=source, initialise=["nothing.*"])

    def test_tensors_that_nothing_takes_are_one_line(self, save: Any, caplog: pytest.LogCaptureFixture) -> None:
        source = save(lambda whole: {**whole, "a.b": torch.zeros(2), "a.c": torch.zeros(2)})
        job = spec(None, from_=source)
        doubt = models.check_start(job, models.outline(job))
        assert doubt is not None and "2 tensors are not the model's and left out: a.b, a.c" in doubt.message
        caplog.clear()
        models.build(job, 0)
        assert [r.getMessage() for r in caplog.records] == [f"{doubt.path}: {doubt.message}"]

    def test_a_mixtures_experts_are_compared_as_transformers_joins_them(self, tmp_path: Path) -> None:
        model: Any = models.build(spec(MIXTRAL), 3)
        model.save_pretrained(tmp_path)
        job = spec(None, from_=str(tmp_path))
        assert models.check_start(job, models.outline(job)) is None
        assert "experts" in next(iter(self.refusals({"num_local_experts": 8}, from_=str(tmp_path))))


@pytest.mark.promise("A token id is never stored as another one, and one that the model does not have is refused")
def test_ids_beyond_the_model_are_named() -> None:
    model = models.build(spec(LLAMA), 0)
    models.check_ids(model, {**tokens(), "labels": torch.tensor([[-100, 255]])})
    for name, bad in (("input_ids", 256), ("input_ids", -1), ("labels", 300), ("labels", -1)):
        with pytest.raises(JobError, match=f"= {bad}: {name} beyond the model's vocabulary of 256"):
            models.check_ids(model, {**tokens(), name: torch.tensor([[0, bad]])})
    vit = models.build(spec(VIT, data=IMAGES), 0)
    models.check_ids(vit, {"pixel_values": torch.zeros(1), "labels": torch.tensor([2])})
    with pytest.raises(JobError, match="beyond the model's 3 classes"):
        models.check_ids(vit, {"pixel_values": torch.zeros(1), "labels": torch.tensor([3])})
    strange = {name: ids + 200 for name, ids in tokens().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(JobError, match="input_ids beyond"):
        trainer.step(model, optimizer, strange, 1, clip_norm=None, dtype=torch.float32)
