"""LoRA on GPT-2-like layers, and adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diloco.export.export import ExportFailed, MergedModel, write_merged
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import parse_job
from diloco_worker.training import models
from diloco_worker.training.export import ExportError, assemble, export
from diloco_worker.training.lora import LoraConv1D, adapters

GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 256}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
TARGETS = {"gpt2": ["*c_attn", "*c_proj"], "llama": ["*q_proj", "*v_proj"]}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA}


def job(model: dict[str, Any]) -> DiLoCoJob:
    document = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "lora"},
        "spec": {
            "training": {"model": model, "data": {"paths": ["python-stdlib"], "sequenceLength": 16}},
            "regions": [{"learners": 1}],
        },
    }
    return parse_job(json.dumps(document))


@pytest.fixture(params=["gpt2", "llama"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(tmp_path: Path, kind: str) -> Path:
    model: Any = models.build(job({"config": CONFIGS[kind]}).spec, 11)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def of_base(kind: str, **changes: Any) -> DiLoCoJob:
    return job({"from": "base", "lora": {"rank": 4, "alpha": 8, "targets": TARGETS[kind], **changes}})


def trained(of: DiLoCoJob, directory: Path) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """The model after some training of its adapters, and its parameters as they come from the store."""
    model = models.build(of.spec, 5, directory=directory)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


def ids() -> torch.Tensor:
    return torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids()).logits
    return found


def test_adapters_begin_as_the_model_train_alone_and_merge_into_it(base: Path, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    of = of_base(kind)
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = models.build(of.spec, 5, directory=tmp_path)
    torch.testing.assert_close(logits(adapted), logits(plain))
    moved = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert moved == {f"{name}.{part}" for name in adapters(adapted) for part in ("lora_a", "lora_b")}
    assert len(adapters(adapted)) == (6 if kind == "gpt2" else 4)
    model, tensors = trained(of, tmp_path)
    assert (logits(model) - logits(plain)).abs().max() > 0.01
    torch.testing.assert_close(logits(assemble(of, tensors, directory=tmp_path)), logits(model), rtol=1e-4, atol=1e-5)
    export(of, tensors, tmp_path / "out", directory=tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in plain.named_parameters()}


def test_the_transposition_of_a_layer_that_is_not_square() -> None:
    """By an oracle that knows nothing of torch: y = x·W + b + alpha/rank · (x·Aᵀ)·Bᵀ, W [in, out]."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer = LoraConv1D(Conv1D(6, 4), 2, 8.0)  # 4 in, 6 out
    with torch.no_grad():
        layer.lora_b.normal_()
        layer.bias.normal_()
    x = torch.randn(2, 3, 4)
    w, b, low, high = (p.detach().double().numpy() for p in (layer.weight, layer.bias, layer.lora_a, layer.lora_b))
    wanted = x.double().numpy() @ w + b + 4.0 * (x.double().numpy() @ low.T) @ high.T
    np.testing.assert_allclose(layer(x).detach().numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.merged()(x).detach().numpy(), wanted, rtol=1e-4, atol=1e-5)


def merged_model(of: DiLoCoJob, tensors: dict[str, np.ndarray], directory: Path) -> MergedModel:
    layout = Layout.build([Tensor("any", (4,), "float32")], 1)  # of which an export of adapters asks nothing
    return MergedModel(of, layout, tensors, [3, 4], directory=directory)


def test_adapters_in_the_form_that_peft_reads(base: Path, kind: str, tmp_path: Path) -> None:
    """Its names, shapes and fields; W + alpha/r·B·A with what the files say is the merged model."""
    of = of_base(kind)
    model, tensors = trained(of, tmp_path)
    written = write_merged(merged_model(of, tensors, tmp_path), tmp_path / "out", adapter=True)
    layers = adapters(model)
    assert f"the merged adapters of {len(layers)} layers in PEFT's format" in written.text
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < files and "model.safetensors" not in files
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    assert wanted.items() <= config.items() and config["fan_in_fan_out"] == (kind == "gpt2")
    assert config["target_modules"] == sorted(layers)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    whole = dict(assemble(of, tensors, directory=tmp_path).named_parameters())
    for name in layers:
        a, b = (found.pop(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
        assert a.shape[0] == b.shape[1] == 4
        added = config["lora_alpha"] / config["r"] * (b @ a)
        weight = torch.from_numpy(tensors[f"{name}.weight"]) + (added.T if config["fan_in_fan_out"] else added)
        torch.testing.assert_close(weight, whole[f"{name}.weight"])
    assert not found


def test_peft_loads_them_and_computes_the_same(base: Path, kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    of = of_base(kind, targets=[*TARGETS[kind], "lm_head"])  # beside Conv1D a Linear, whose weight lies the other way
    model, tensors = trained(of, tmp_path)
    write_merged(merged_model(of, tensors, tmp_path), tmp_path / "out", adapter=True)
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(alone), logits(model), rtol=1e-4, atol=1e-5)


def test_a_head_that_shares_the_embedding_keeps_its_adapter_in_an_export(tmp_path: Path) -> None:
    """GPT-2's head is its embedding; with an adapter folded in it is another matrix."""
    from transformers import AutoModelForCausalLM

    config = {**GPT2, "tie_word_embeddings": True}
    of = job({"config": config, "lora": {"rank": 2, "alpha": 4, "targets": ["lm_head"]}})
    model, tensors = trained(of, tmp_path)
    export(of, tensors, tmp_path / "out", directory=tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_what_has_no_adapters_or_no_base_says_so(base: Path, kind: str, tmp_path: Path) -> None:
    for model, words in [
        ({"config": LLAMA}, "has no training.model.lora.*leave --adapter out"),
        ({"config": LLAMA, "lora": {}}, "began with random weights.*no base.*leave --adapter out"),
    ]:
        of = job(model)
        with pytest.raises(ExportFailed, match=words):
            write_merged(merged_model(of, {}, tmp_path), tmp_path / "out", adapter=True)
    of = of_base(kind)
    _, tensors = trained(of, tmp_path)
    tensors.pop(next(name for name in tensors if name.endswith("lora_b")))
    with pytest.raises(ExportFailed, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.lora_b"):
        write_merged(merged_model(of, tensors, tmp_path), tmp_path / "out", adapter=True)
    with pytest.raises(ExportError):
        export(of, tensors, tmp_path / "out", directory=tmp_path)
    assert not (tmp_path / "out").exists()


def test_patterns_that_match_nothing_name_the_layers_that_there_are() -> None:
    from diloco_protocol.spec.load import JobError

    of = job({"config": GPT2, "lora": {"targets": ["*q_proj"]}})
    with pytest.raises(JobError, match=r"match no linear layer; there are .*h\.0\.attn\.c_attn"):
        models.build(of.spec, 0)
