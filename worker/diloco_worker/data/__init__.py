"""The training data of a job: ``load(spec, held_out)`` gives a map-style data set.

A data set has ``len(data)`` and ``data[i]``, an item being a dict of tensors that the model takes: ``input_ids`` and
``labels`` (int64 [sequenceLength]) for text, ``pixel_values`` (float32 [channels, height, width]) and ``labels``
(int64 []) for images. The learner's leases decide which items a process trains on. The training part comes shuffled
by the job's seed (shuffle.py says why), and every process of a job sees the same items under the same numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from diloco_protocol.spec.job_spec import JobSpec
from diloco_worker.data import found as findings
from diloco_worker.data import hf_hub, python, text
from diloco_worker.data.shuffle import Dataset, Permutation, Shuffled
from diloco_worker.data.split import LoadOptions
from diloco_worker.errors import job_error

__all__ = ["Dataset", "check", "load", "tokens_in"]


def load(
    spec: JobSpec, held_out: bool = False, *, directory: Path | None = None, cache_directory: Path | None = None
) -> Dataset:
    """The data of ``spec.training.data``: the training part, or the part held out for evaluation.

    ``directory`` is where relative paths and the user's modules are looked for (default: DILOCO_JOB_DIRECTORY, the
    job file's, else the current one); token files go to ``cache_directory`` (default: ``cache`` in DILOCO_WORKDIR;
    without one, to a private temporary file). Raises JobError naming the field, the value and the cure.
    """
    data = spec.training.data
    if data is None:
        raise job_error("spec.training.data", None, "is required by the built-in trainer")
    directory = directory or Path(os.environ.get("DILOCO_JOB_DIRECTORY") or Path.cwd())
    workdir = os.environ.get("DILOCO_WORKDIR")
    if cache_directory is None and workdir:
        cache_directory = Path(workdir) / "cache"
    # Without evaluation nothing is held out.
    fraction = spec.training.evaluation.fraction if spec.training.evaluation is not None else 0.0
    options = LoadOptions(fraction, held_out, directory, cache_directory)
    found: Dataset
    if data.source == "text":
        found = text.load(data, options)
    elif data.source == "datasets":
        found = hf_hub.load(data, options)
    else:
        found = python.load(data, held_out, directory)
    check(spec, found, held_out)
    _report(data.function or data.name or "", found, held_out, cache_directory)
    # What is held out keeps its order: the evaluator spreads what it takes over all of it.
    return found if held_out else Shuffled(found, Permutation(len(found), spec.seed))


def _report(source: str, dataset: Dataset, held_out: bool, cache_directory: Path | None) -> None:
    """Say what was found: in the log, and, of what is trained on, for the screen of `diloco run`."""
    part = "held out" if held_out else "to train on"
    line, warnings = f"{source}: {len(dataset):,} items {part}", []
    if isinstance(dataset, text.TokenSequences):
        whole, warnings = dataset.found.line(len(dataset.tokens), dataset.length), dataset.found.warnings()
        line = f"{whole}, {len(dataset):,} of them {part}"
    findings.report(line, warnings, None if held_out else cache_directory)


def check(spec: JobSpec, data: Dataset, held_out: bool) -> None:
    """Raise JobError unless there is at least one step's batch to train on, one sequence to evaluate on."""
    batch, count = spec.training.batch, len(data)
    if held_out:
        if count == 0:
            fraction = spec.training.evaluation.fraction if spec.training.evaluation else 0.0
            raise job_error(
                "spec.training.evaluation.fraction",
                fraction,
                "holds no sequence out of data this short: raise it, name more data, "
                "or set training.evaluation to null",
            )
        return
    needed = batch.sequences * batch.accumulation
    if count < needed:
        raise job_error(
            "spec.training.data",
            count,
            f"{count} sequences to train on are less than one batch of {needed} (sequences x accumulation "
            "of training.batch, or of the region's): name more data, or lower the batch or "
            "training.data.sequenceLength",
        )


def tokens_in(batch: dict[str, torch.Tensor]) -> int:
    """Tokens of a batch: every input id counts one; of images, every image."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return int(batch["labels"].shape[0])
