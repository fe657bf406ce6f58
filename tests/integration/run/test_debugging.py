"""The script of a loop of one's own runs under plain ``python``, with breakpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LOOP = """
import torch
import diloco_worker

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches([torch.ones(4)] * 64):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if learner.step == 1:
            breakpoint()
        learner.after_step(tokens=len(batch), loss=loss)
        if learner.step == 3:
            break
print("ended at step", learner.step)
"""


def test_a_script_trains_alone_and_stops_at_a_breakpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "PYTHONBREAK"))}
    done = subprocess.run(
        [sys.executable, "train.py"],
        input="p 'stopped', learner.step, tuple(batch.shape)\nc\n",
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('stopped', 1, (16, 4))" in done.stdout and "ended at step 3" in done.stdout
    assert done.stderr.count("training alone") == 1 and "diloco run JOB.yaml" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is written"
