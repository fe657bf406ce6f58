"""How bench/bandwidth.py cuts a model for torchft's DiLoCo."""

from __future__ import annotations

import sys

import pytest

from diloco_protocol.spec.load import load_job
from diloco_worker.training.models import outline
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import torchft_replica

EXAMPLE = ROOT / "examples" / "tiny-gpt.yaml"


@pytest.mark.parametrize(("layers", "every", "count"), [(4, 24, 4), (2, 6, 2), (3, 8, 2), (4, 5, 1), (1, 24, 1)])
def test_fragments_have_every_parameter_once_and_divide_a_turn(layers: int, every: int, count: int) -> None:
    job = load_job(EXAMPLE, (f"training.model.config.num_hidden_layers={layers}",))
    model = outline(job.spec, directory=EXAMPLE.parent)
    fragments = torchft_replica.fragments_of(model, every)
    assert len(fragments) == count and every % count == 0
    found = [id(parameter) for part in fragments for parameter in part.parameters()]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())
