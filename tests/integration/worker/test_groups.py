"""Learners of several ranks beside learners of one, through a real syncer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from group_process import start_group
from learner_process import Syncer
from safetensors.torch import load_file

DETERMINISTIC = {
    "fragments": 3,
    "every": 6,
    "overlap": 2,
    "deterministic": True,
    "compression": {"up": "float32", "down": "float32"},
}


def run(folder: Path, start: Callable[..., Syncer], forms: list[tuple[str, int, int | None]], **sync: object) -> tuple[list[dict[str, torch.Tensor]], dict]:
    service = start({**DETERMINISTIC, **sync}, {"steps": 24}, learners=len(forms))
    started = [start_group(service, ordinal, *form) for ordinal, form in enumerate(forms)]
    for ranks in started:
        for rank in ranks:
            assert rank.wait() == 0, rank.log.read_text()
    report = service.last_report()
    return [load_file(service.folder / f"final-{i}.safetensors") for i in range(len(forms))], report


@pytest.mark.parametrize(
    "forms",
    [
        [("ddp", 2, None), ("single", 1, None)],
        [("fsdp", 2, None), ("single", 1, None)],
        [("hsdp", 4, None), ("fsdp", 2, 1)],
    ],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_groups_and_single_processes_make_the_same_model(
    forms: list[tuple[str, int, int | None]], syncer: Callable[..., Syncer], tmp_path: Path
) -> None:
    models, report = run(tmp_path, syncer, forms)
    print(report["tokens"])
    print({n: t.flatten()[:4] for n, t in models[0].items()})
    print({n: t.flatten()[:4] for n, t in models[1].items()})
    assert report["outcome"] == "complete"
