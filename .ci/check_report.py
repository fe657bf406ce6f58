"""Does the demo's report say what a demo must: complete, the killed learner back, tokens accounted for,
a loss well below what one token back can tell; and is the exported model the one that was scored?

    .venv/bin/python .ci/check_report.py runs/demo
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

BELOW_BIGRAM = 0.3  # nats per token
SAME_LOSS = 1e-3  # broadcasts are bfloat16, the exported weights float32


def problems(report: dict) -> list[str]:
    """What is wrong with the report, in words; empty: nothing."""
    found = []
    if report.get("schema") != 1:
        found.append(f"schema is {report.get('schema')!r}, not 1")
    if report.get("outcome") != "complete":
        found.append(f"outcome is {report.get('outcome')!r}, not 'complete'")
    faults = report.get("faults") or []
    if not faults:
        found.append("no fault is recorded, but the demo kills a learner")
    for fault in faults:
        if not isinstance(fault.get("recovered_seconds"), (int, float)):
            found.append(f"the fault {fault.get('action')} {fault.get('target')} never recovered")
    initial, final = report.get("initial_loss"), report.get("final_loss")
    for name, loss in (("initial_loss", initial), ("final_loss", final)):
        if not isinstance(loss, (int, float)) or not math.isfinite(loss):
            found.append(f"{name} is {loss!r}, not a finite number")
    if not found and not final < initial - 1.0:
        found.append(f"the merged model did not learn: loss {initial} at the start, {final} at the end")
    tokens = report.get("tokens") or {}
    if not tokens.get("trained", 0) > 0:
        found.append("no token was trained")
    if tokens.get("trained") != sum(tokens.get(name, 0) for name in ("merged", "pending", "dropped")):
        found.append(f"merged + pending + dropped is not trained: {tokens}")
    for row in report.get("ledger") or []:
        if row["merged"] + row["pending"] + row["dropped"] != tokens.get("trained"):
            found.append(f"ledger row of fragment {row['fragment']} does not sum to {tokens.get('trained')}")
        if sum(row["reasons"].values()) != row["dropped"]:
            found.append(f"fragment {row['fragment']} dropped {row['dropped']} for reasons {row['reasons']}")
    if not report.get("ledger"):
        found.append("the ledger is empty")
    if not report.get("merges", 0) > 0:
        found.append("nothing was merged")
    return found


def model_problems(report: dict, entropy: float, exported: float) -> list[str]:
    """What is wrong with the model. ``entropy``: of bigrams in the held-out data; ``exported``: the
    loss of the model that `diloco export` wrote, both in nats per token."""
    found, final = [], report["final_loss"]
    if not final <= entropy - BELOW_BIGRAM:
        found.append(f"final_loss {final:.4f} is not {BELOW_BIGRAM} below the bigram entropy {entropy:.4f}")
    if not abs(exported - final) <= SAME_LOSS:
        found.append(f"the exported model's loss is {exported:.5f}, final_loss says {final:.5f}")
    return found


def measure(workdir: Path) -> tuple[float, float]:
    """The bigram entropy of the run's held-out data; the exported model's loss on the evaluator's batches."""
    import torch
    from transformers import AutoModelForCausalLM

    from bigram import bigram_entropy  # bench/bigram.py
    from diloco.processes.workdir import Workdir
    from diloco_protocol.spec.load import job_from_json
    from diloco_worker import data, device
    from diloco_worker.data.text import TokenSequences
    from diloco_worker.training.evaluator import chosen, mean_loss

    job = job_from_json((workdir / "job.json").read_bytes())
    directory = Workdir(workdir.absolute()).job_directory()
    held_out = data.load(job.spec, held_out=True, directory=directory, cache_directory=workdir / "cache")
    assert isinstance(held_out, TokenSequences)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "model"
        command = [sys.executable, "-m", "diloco.main", "export", str(workdir), str(out)]
        subprocess.run(command, check=True, timeout=120)
        model = AutoModelForCausalLM.from_pretrained(out)
    dtype = device.precision(job.spec, torch.device("cpu"))
    return bigram_entropy(held_out), mean_loss(model, chosen(held_out, job.spec), dtype)


def main() -> int:
    path = Path(sys.argv[1])
    report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    found = problems(report)
    if not found:
        entropy, exported = measure(path)
        found = model_problems(report, entropy, exported)
        print(f"bigram entropy {entropy:.4f}, exported model {exported:.4f} nats per token")
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if not found:
        recovered = [fault["recovered_seconds"] for fault in report["faults"]]
        print(
            f"report: loss {report['initial_loss']:.3f} -> {report['final_loss']:.3f}, "
            f"{report['merges']} merges, recovered after {recovered} s"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
