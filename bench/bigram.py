"""Bigram entropy of a job's held-out data: what a model that sees one token back could reach at best.

    python bench/bigram.py examples/tiny-gpt.yaml [--report runs/demo/report.json] [--json]

Prints the empirical conditional entropy of the held-out split in nats per token, counted over
the predictions that the evaluator scores, and with a run's report how far below it the run ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.spec.load import JobError, load_job
from diloco_worker import data
from diloco_worker.data.text import TokenSequences


def main() -> int:
    parser = argparse.ArgumentParser(description="Bigram entropy of a job's held-out data.")
    parser.add_argument("job", type=Path)
    parser.add_argument("--report", type=Path, help="report.json of a run of the job")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        job = load_job(arguments.job)
        held_out = data.load(job.spec, held_out=True, directory=arguments.job.resolve().parent)
    except JobError as error:
        print(error, file=sys.stderr)
        return 2
    if not isinstance(held_out, TokenSequences):
        print("the job's data are no text", file=sys.stderr)
        return 2
    entropy = bigram_entropy(held_out)
    final = json.loads(arguments.report.read_text())["final_loss"] if arguments.report else None
    if arguments.json:
        row = {"name": "bigram entropy", "value": entropy, "unit": "nats per token"}
        against = {"against": "final_loss", "ratio": final / entropy} if final is not None else {}
        print(json.dumps([{**row, **against}]))
    else:
        print(f"bigram entropy of {len(held_out)} held-out sequences: {entropy:.4f} nats per token")
        if final is not None:
            print(f"final loss {final:.4f}: {entropy - final:.4f} nats below")
    return 0


def bigram_entropy(data: TokenSequences) -> float:
    """Empirical conditional entropy of a token given the one before it, nats per token.

    Counted over exactly the predictions a model is scored on: within each sequence, every token but the first. No
    model that sees one token back can have a lower mean loss on these sequences, whatever it was trained on.
    Raises ValueError for an empty data set.
    """
    if not len(data):
        raise ValueError("an empty data set has no entropy")
    rows = np.stack([data[k]["input_ids"].numpy() for k in range(len(data))])
    before, after = rows[:, :-1].ravel(), rows[:, 1:].ravel()
    _, pairs = np.unique(before << 32 | after, return_counts=True)
    _, singles = np.unique(before, return_counts=True)
    # H(next | prev) = H(prev, next) - H(prev)
    return _entropy(pairs) - _entropy(singles)


def _entropy(counts: NDArray[np.int64]) -> float:
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


if __name__ == "__main__":
    sys.exit(main())
