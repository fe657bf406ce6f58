"""What of a job can be found wrong before it is started: its model, its tokenizer, its device.

The model is built as learners build it, on torch's meta device: names and shapes, no values and no memory, however
large it is. ``main`` does it in a process of its own, for commands that do not load torch: with DILOCO_CHECK in its
environment a worker process writes its findings to the file which that names, and ends.
"""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from diloco_protocol.common.files import write_whole
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError, Problem, read_job
from diloco_worker import device
from diloco_worker.data import text
from diloco_worker.errors import one_line
from diloco_worker.fragments import build_layout
from diloco_worker.settings import ConfigurationError
from diloco_worker.training import models
from diloco_worker.training.findings import VARIABLE, JobFindings, ModelFacts
from diloco_worker.training.optimizer import total_steps
from diloco_worker.training.pretrained import FIELD as FROM

T = TypeVar("T")
HUB_SECONDS = 4.0


def check_job(spec: JobSpec, directory: Path | None = None) -> JobFindings:
    """Check the job's own model on this machine. ``directory``: where relative paths start.

    Of the training data only a part is read, and no code of the user's is run."""
    wrong: list[Problem] = []
    here: list[Problem] = []
    where = _tried(lambda: device.device(spec), here)
    data = spec.training.data
    if data is not None and data.source != "python" and _tried(lambda: text.tokenizer(data.tokenizer), here) is None:
        # Its vocabulary is not known: everything else of the model is looked at all the same.
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"data": None})})
    model, unchecked = _outline(spec, directory, wrong, here)
    doubts = [] if model is None else _check_start(spec, model, directory, here=here, unchecked=unchecked)
    facts, tokens = None, None
    if (built := model) is not None:
        facts, tokens = _tried(lambda: _facts(spec, built), wrong), _step_tokens(spec, built)
    held = ("", False)
    if (kept := spec.training.data) is not None and spec.learners.command is None:
        held = text.summarise_data(kept, directory or Path.cwd())
    steps = None if tokens is None else total_steps(spec.training.stop, 1, tokens)
    kind = "" if where is None else where.type
    return JobFindings(
        tuple(wrong),
        tuple(here),
        tuple(unchecked),
        facts,
        device=kind,
        step_tokens=tokens,
        steps=steps,
        doubts=tuple(doubts),
        data=held[0],
        data_in_part=held[1],
        device_bytes=0 if kind != "cuda" else device.smallest_memory(),
    )


def main() -> int:
    """Check the job of the environment, and write the findings."""
    job = read_job(Path(os.environ["DILOCO_JOB_FILE"]))
    look_only_in_cache_if_offline(job.spec)
    found = check_job(job.spec, Path(os.environ.get("DILOCO_JOB_DIRECTORY") or Path.cwd()))
    write_whole(Path(os.environ[VARIABLE]), found.to_json().encode())
    return 0


def look_only_in_cache_if_offline(spec: JobSpec) -> None:
    """Where the job names something on Hugging Face's hub and nothing answers there, have its library look only into
    its cache: it would try again for a minute. For this process's whole life."""
    data, model = spec.training.data, spec.training.model
    tokenizer = data.tokenizer if data is not None and data.source != "python" else "bytes"
    source = model.from_ if model is not None else None
    named = [name for name in (tokenizer, source) if name not in ("bytes", None) and not Path(str(name)).is_dir()]
    if not named or getproxies():
        return
    from huggingface_hub import constants

    if not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True


def _answers(url: str) -> bool:
    """Whether something listens there. Asked in a thread, for a name's look-up may take long."""
    parts, reached = urlsplit(url), threading.Event()

    def connect() -> None:
        try:
            port = parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection((parts.hostname or "", port), timeout=HUB_SECONDS).close()
            reached.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return reached.is_set()


def _tried(do: Callable[[], T], problems: list[Problem]) -> T | None:
    """What ``do`` gives; None: it found problems, which are added."""
    try:
        return do()
    except JobError as error:
        problems += error.problems
    except ConfigurationError as error:
        problems.append(Problem("spec.training.model", None, str(error)))
    return None


def _outline(
    spec: JobSpec, directory: Path | None, wrong: list[Problem], here: list[Problem]
) -> tuple[nn.Module | None, list[str]]:
    """The model without its values, and what was not looked at."""
    model = spec.training.model
    if model is None:
        return None, []
    if model.from_ is not None and "://" in model.from_:
        return None, [f"the model: its weights are copied from {model.from_} when the job starts"]
    try:
        return models.outline(spec, directory=directory), []
    except JobError as error:
        cause = error.__cause__
        if cause is not None and "meta" in str(cause):  # a model whose construction needs values
            return None, [f"the model: its construction needs values ({cause})"]
        for problem in error.problems:
            (here if problem.path == FROM else wrong).append(problem)
    return None, []


def _check_start(
    spec: JobSpec, model: nn.Module, directory: Path | None, here: list[Problem], unchecked: list[str]
) -> list[Problem]:
    """Compare the weights to start from with the model, by their headers. Returns warnings."""
    try:
        doubt = models.check_start(spec, model, directory=directory)
    except JobError as error:
        here += error.problems
    except Exception as error:  # the hub's client, a file's header, and transformers have classes of their own
        unchecked.append(f"the tensors of training.model.from: {one_line(error)}")
    else:
        return [doubt] if doubt is not None else []
    return []


def _facts(spec: JobSpec, model: nn.Module) -> ModelFacts:
    sync = spec.sync
    layout = build_layout(model, sync.fragments, sync.every, sync.merge.mean_tensors)
    parameters = list(model.parameters())  # tied ones once
    return ModelFacts(
        type(model).__name__,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() * p.element_size() for p in parameters),
        fragments=tuple(layout.elements(p) for p in range(len(layout))),
        note=layout.note,
    )


def _step_tokens(spec: JobSpec, model: nn.Module) -> int | None:
    """Tokens of one step of every learner; None: the data decide."""
    data, takes = spec.training.data, inspect.signature(model.forward).parameters
    if data is None:
        return None
    item = 1 if "pixel_values" in takes and "input_ids" not in takes else data.sequence_length
    if item > 1 and data.source == "python":
        return None
    batches: list[Any] = [(region.learners, spec.batch_of(region.name)) for region in spec.regions]
    return sum(learners * batch.sequences * batch.accumulation * item for learners, batch in batches) or None
