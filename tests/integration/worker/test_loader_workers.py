"""A loop whose data come from a DataLoader with worker processes: they are forked while the learner is connected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from learner_process import Syncer

from patience import wait_until

LOADERS = 10
LOOP = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset
from diloco_worker import Learner

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = TensorDataset(torch.randn(32, 8))
loaders = 0
with Learner.from_environment(model, optimizer) as learner:
    stream = iter(())
    for _ in learner.steps():
        batch = next(stream, None)
        if batch is None:
            loaders += 1
            if loaders > {LOADERS}:
                break
            stream = iter(DataLoader(rows, batch_size=8, num_workers=2))
            batch = next(stream)
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        learner.after_step(tokens=8)
print("loaders:", loaders - 1)
"""


@pytest.mark.promise("A loop may read its data by a DataLoader with worker processes, and may fork")
@pytest.mark.slow
def test_a_loader_with_workers_is_made_again_and_again(syncer: Callable[..., Syncer], tmp_path: Path) -> None:
    service = syncer({}, {"steps": 1_000_000})
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    said = tmp_path / "loop.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, **service.environ()}, stdout=log, stderr=log
        )
        try:
            wait_until(lambda: process.poll() is not None, "the loop's end")
        finally:
            process.kill()
    text = said.read_text()
    assert process.returncode == 0, text
    assert f"loaders: {LOADERS}" in text and "fork" not in text, text
