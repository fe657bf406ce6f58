"""``load_merged``: the merged model of a job in a program of your own, after training or while it goes on.

It is the command line's: the code that reads stores, outputs and listeners belongs to ``diloco export``
(``diloco.export``). A learner must not load that, so it is looked up by name when somebody calls; here its arrays
only become tensors.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from diloco_worker.settings import WorkerError


def load_merged(source: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The merged parameters of a job by name: what ``diloco export`` writes for a loop of your own, without the files.

    ``source``: the directory of a run (``runs/my-job``), also while it runs; where the job's ``output.uri`` has led
    (a directory, or a URI such as ``s3://bucket/folder``); or ``host:port`` of a syncer's export listener, in a cluster
    through ``kubectl port-forward`` to port 7703 of the syncer's pod.

    Each tensor has the parameter's own shape, is float32 whatever its dtype was in training, is on the CPU, and owns
    its memory. Frozen parameters are among them; buffers are not, so a model takes them by
    ``model.load_state_dict(load_merged(source), strict=False)``. The names are those of the model that was trained:
    of a job with LoRA the adapters' tensors stand beside the others, not folded in. Tied parameters are one tensor,
    by the first of their names; the model that ties them has the others from it.

    Raises WorkerError: there is no run, it has no version 0 yet, its store is damaged, or nobody answers.
    """
    export: Any = importlib.import_module("diloco.export.export")
    try:
        model = export.read_merged(os.fspath(source))
    except export.CommandError as error:
        raise WorkerError(str(error)) from error
    return {
        name: torch.from_numpy(values if values.flags.writeable else values.copy())
        for name, values in model.tensors.items()
    }
