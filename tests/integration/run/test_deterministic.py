"""``sync.deterministic``: two runs with one seed export the same bits, another seed other ones."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.main import app

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: exact}}
spec:
  training:
    model: {{config: {{model_type: llama, hidden_size: {width}, intermediate_size: 64, num_hidden_layers: 2,
                     num_attention_heads: 2, num_key_value_heads: 2}}}}
    data: {{source: text, paths: [corpus.txt], sequenceLength: 32}}
    batch: {{sequences: 4}}
    device: cpu
    stop: {{{stop}}}
    evaluation: null
  sync: {{fragments: 4, every: 8, overlap: 2, deterministic: true}}
  regions: [{{learners: {learners}}}]
"""


def run(*arguments: str, cwd: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "run", *arguments],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def weights(tmp_path: Path, name: str, learners: int, seed: int, stop: str) -> str:
    """SHA-256 of what a whole run exports."""
    (tmp_path / "corpus.txt").write_text(
        "how vexingly quick daft zebras jump over the lazy dog, again and again\n" * 3000
    )
    (tmp_path / "job.yaml").write_text(JOB.format(learners=learners, stop=stop, width=32 * learners))
    run("job.yaml", "--workdir", name, "--seed", str(seed), cwd=tmp_path)
    exported = CliRunner().invoke(app, ["export", str(tmp_path / name), str(tmp_path / f"{name}-out")])
    assert exported.exit_code == 0, exported.output
    return hashlib.sha256((tmp_path / f"{name}-out" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.timeout(600)
def test_one_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path, learners: int) -> None:
    # 33 steps do not end with a merge, so that the last offers are part of it; tokens are shared out.
    stop = "steps: 33" if learners == 1 else f"tokens: {3 * 33 * 128 - 5}"
    # The wider model of three has fragments that are large enough for the syncer's pooled memory.
    first = weights(tmp_path, "a", learners, 7, stop=stop)
    assert weights(tmp_path, "b", learners, 7, stop=stop) == first
    if learners == 1:
        assert weights(tmp_path, "c", learners, 8, stop=stop) != first
