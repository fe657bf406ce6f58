"""Learners of several ranks beside learners of one, through a real syncer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from group_process import start_group
from learner_process import Syncer

from diloco_worker import load_merged

STEPS = 24
DETERMINISTIC = {
    "fragments": 3,
    "every": 6,
    "overlap": 2,
    "deterministic": True,
    "compression": {"up": "float32", "down": "float32"},
}
Forms = list[tuple[str, int, int | None]]  # of each learner: how it is wrapped, its ranks, how many share memory
SINGLES: Forms = [("single", 1, None), ("single", 1, None)]


def train(start: Callable[..., Syncer], forms: Forms, **sync: object) -> tuple[dict[str, torch.Tensor], Syncer]:
    """A deterministic job of these learners to its end: the merged model."""
    service = start({**DETERMINISTIC, **sync}, {"steps": STEPS}, learners=len(forms))
    started = [start_group(service, ordinal, *form) for ordinal, form in enumerate(forms)]
    for rank in [rank for ranks in started for rank in ranks]:
        assert rank.wait() == 0, rank.log.read_text()
    report = service.last_report()
    assert report["outcome"] == "complete"
    assert report["tokens"] == {"trained": 1536, "merged": 1536, "pending": 0, "dropped": 0}
    return load_merged(service.folder), service


_singles: dict[str, dict[str, torch.Tensor]] = {}


def assert_same_as_singles(start: Callable[..., Syncer], forms: Forms, **sync: object) -> None:
    """The groups' model is that of two single processes, to float32 rounding."""
    key = json.dumps(sync, sort_keys=True)
    merged, service = train(start, forms, **sync)
    service.stop()
    if key not in _singles:
        for path in service.folder.iterdir():
            path.rename(path.with_name(f"groups-{path.name}"))
        _singles[key] = train(start, SINGLES, **sync)[0]
    assert merged.keys() == _singles[key].keys()
    for name, values in merged.items():
        torch.testing.assert_close(values, _singles[key][name], rtol=1e-5, atol=2e-6)


@pytest.mark.promise("A learner of several ranks (DDP, FSDP2, HSDP) makes the model that one process makes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "forms",
    [
        [("ddp", 2, None), ("single", 1, None)],
        [("fsdp", 2, None), ("ddp", 2, 1)],
        [("hsdp", 4, None), ("fsdp", 4, 2)],
        [("columns", 2, None), ("single", 1, None)],
    ],
    ids=["ddp", "fsdp", "hsdp", "columns"],
)
def test_groups_make_the_model_of_single_processes(forms: Forms, syncer: Callable[..., Syncer]) -> None:
    """Among the ranks some have no memory in common with their leader, as if they were on another host."""
    assert_same_as_singles(syncer, forms)
