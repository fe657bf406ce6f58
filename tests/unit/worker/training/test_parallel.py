"""The built-in trainer in ranks: the same training as one process on the whole batch, however the model is divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranks_of_trainer as ranks
from diloco_protocol.spec.load import JobError
from diloco_worker.settings import ConfigurationError
from diloco_worker.training.parallel import sharding

CASES: dict[str, dict[str, object]] = {
    "fsdp": {},
    "hsdp": {"parallel": {"replicate": 2}},
    "ddp": {"parallel": {"shard": 1, "replicate": 4}},
    "recomputed": {"activationCheckpointing": True},
    "bfloat16": {"precision": "bfloat16"},
}
BEGINS: list[dict[str, object]] = [
    {"parallel": {"replicate": 2}},
    {"model": {"config": ranks.CONFIG, "lora": {"rank": 2}}},
    {"model": {"config": {**ranks.CONFIG, "tie_word_embeddings": False}, "freeze": ["*embed*"]}},
]
Found = Mapping[str, Mapping[str, torch.Tensor]]


def train_in_ranks(folder: Path) -> Found:
    """What four ranks train, in every case."""
    ranks.models.build(ranks.spec_of(), 7).save_pretrained(folder / "start")
    begins = [{"model": {"from": str(folder / "start")}}, *BEGINS]
    command = [sys.executable, "-m", "diloco_worker.launch", "--processes", "4", sys.executable, ranks.__file__]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(folder), json.dumps(CASES), json.dumps(begins)], check=True, env=environ, timeout=300)
    return {name: load_file(folder / f"{name}.safetensors") for name in CASES}


def test_models_in_ranks_are_trained_as_in_one_process(tmp_path: Path) -> None:
    """One test, so that the ranks are started once."""
    found = train_in_ranks(tmp_path)
    for case in CASES:
        check_case(case, found[case])
    whole = sum(p.numel() for p in ranks.models.build(ranks.spec_of(), 5).parameters())
    kept = {name: values["kept"] for name, values in found.items()}
    assert kept["fsdp"].sum() == whole and kept["fsdp"].max() < 0.3 * whole
    assert kept["hsdp"].sum() == 2 * whole and kept["ddp"].tolist() == [whole] * 4


def check_case(case: str, found: Mapping[str, torch.Tensor]) -> None:
    bfloat16 = case == "bfloat16"
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    model, losses = ranks.train(ranks.spec_of(**CASES[case]), 1, slice(None), dtype)
    start = dict(ranks.models.build(ranks.spec_of(), 5).named_parameters())
    for name, values in ranks.whole_values(model).items():
        moved, apart = values - start[name].detach(), values - found[name]
        assert apart.norm() < (0.1 if bfloat16 else 1e-4) * moved.norm(), (case, name)
    counts = torch.tensor([ranks.models.predictions(part) for part in ranks.trainer.parts(ranks.batch_of(0), 4)])
    joined = (found["losses"] * counts[:, None]).sum(0) / counts.sum()
    assert torch.allclose(joined, torch.stack(losses).double(), rtol=1e-2 if bfloat16 else 1e-5), case


def test_ranks_of_another_number_are_refused() -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    with pytest.raises(JobError, match=r"must be the 3 ranks that were started .WORLD_SIZE.: leave shard out"):
        sharding.begin_ranks(ranks.spec_of(parallel={"shard": 4}), {"WORLD_SIZE": "3", **variables})
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 3, and LOCAL_RANK is 'x': it must be a whole number"):
        sharding.begin_ranks(ranks.spec_of(), {"WORLD_SIZE": "3", **variables, "LOCAL_RANK": "x"})


def test_blocks_are_what_the_class_says_else_the_items_of_lists() -> None:
    assert len(sharding.find_blocks(ranks.models.build(ranks.spec_of(), 5))) == 2
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 1))
    assert sharding.find_blocks(plain) == [plain[1][0]]


def test_blocks_are_compiled_and_recomputed_where_the_job_says_so() -> None:
    def prepared(**training: bool) -> list[torch.nn.Module]:
        spec = ranks.spec_of(**training)
        return sharding.find_blocks(ranks.build(spec, 1))

    assert [one.gradient_checkpointing for one in prepared(activationCheckpointing=True)] == [True] * 2
    assert [one._compiled_call_impl is not None for one in prepared(compile=True)] == [True] * 2
    assert not any(one.gradient_checkpointing or one._compiled_call_impl for one in prepared())
