"""``diloco export``: the merged model of a run as a directory that transformers loads.

A job without ``training.model`` has a model that only its own program knows: of such a one the parameters are written,
with the layout (tensors.py).

Reads the store beside whoever writes it, so a run may be going on: of every fragment it
takes the newest durable version, as a restart of the syncer would, and changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from diloco.console import FAILED, CommandError, unwritable_text
from diloco.export.remote_model import RemoteModelError, fetch_layout, fetch_model
from diloco.export.tensors import write_tensors
from diloco.packages import require_packages
from diloco.processes.workdir import Workdir, find
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import FileError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, read_job
from diloco_syncer.output.model_file import NotSafetensors, as_float32, frozen_entries
from diloco_syncer.output.read_output import NoOutput, read_output
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import read_document
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import Damaged, FormatRefused
from diloco_syncer.store.restore import StoreReader, StoreUnusable

_ADDRESS = re.compile(r"http://.+|(\[[0-9a-fA-F:]+\]|[^:/\s]+):[0-9]{1,5}")
MOST_DIFFERENCE = 0.02
"""Of the loss, from the job's last score: that may be of arithmetic in bfloat16, and a few merges older."""
TRIES = 5  # a running syncer may remove a version just as it is read


class ExportFailed(CommandError):
    """Nothing was written; the message says why and the cure."""


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The merged model of a job. ``tensors``: every parameter by name, float32, in its shape. ``directory``: where the
    job's relative paths start; ``workdir``: the run's; ``score``: the job's last, after the tokens that were trained
    and the merges that were made until then. None: not known."""

    job: DiLoCoJob
    layout: Layout
    tensors: Mapping[str, NDArray[Any]]
    versions: Sequence[int]  # of the fragments
    directory: Path | None = None
    workdir: Path | None = None
    score: tuple[int, float, int] | None = None


def read_merged(what: str) -> MergedModel:
    """From where ``what`` says: a run's directory; where ``output.uri`` has led, a directory or a bucket; or the
    address of a syncer's export listener, such as 127.0.0.1:7703. Raises CommandError."""
    if not os.path.exists(what) and _ADDRESS.fullmatch(what):
        return read_url(what if "://" in what else f"http://{what}")
    if _is_output(what):
        return read_place(what)
    if _is_export(what):
        raise ExportFailed(
            f"{what} is an export already: load model.safetensors in it with safetensors.torch.load_file, or the"
            " directory with transformers where the job has training.model"
        )
    return read_run(find(what))


def read_run(workdir: Workdir) -> MergedModel:
    """From a run's directory. Raises ExportFailed."""
    try:
        job = read_job(workdir.job)
        if not (workdir.store / "initial.json").is_file():
            raise ExportFailed(f"{workdir.path} holds no model yet: its run has not reached version 0")
        store = DirectoryStore(workdir.store)
        layout, tensors, versions = read_model(store, job.metadata.name)
        score = _last_score(store)
    except FileNotFoundError as error:
        raise ExportFailed(f"{workdir.path} is no run's directory: {error.filename} is missing") from error
    except (Damaged, FormatRefused, FileError, JobError, OSError) as error:
        raise ExportFailed(str(error)) from error
    return MergedModel(
        job, layout, tensors, versions, directory=workdir.job_directory(), workdir=workdir.path, score=score
    )


def _last_score(store: Store) -> tuple[int, float, int] | None:
    for name in reversed(store.list("state")):
        with contextlib.suppress(Damaged, ObjectNotFound, KeyError, IndexError, TypeError, ValueError):
            scores = read_document(store, name)["core"]["core"]["job"]["scores"]
            tokens, loss = scores["rows"][-1]
            return int(tokens), float(loss), int(scores["newest_merges"])
    return None


def read_url(url: str, progress: Callable[[int, int], None] = lambda done, total: None) -> MergedModel:
    """From a syncer's export listener (remote_model.py). ``progress`` is told bytes received and bytes in all. Raises
    ExportFailed, with exit code 1: the syncer does not answer as it should."""
    try:
        job, tensors, versions = fetch_model(url, progress)
        return MergedModel(job, fetch_layout(url), tensors, versions)
    except RemoteModelError as error:
        raise ExportFailed(str(error), FAILED) from error


def read_place(place: str) -> MergedModel:
    """From where ``output.uri`` has led: a directory or a bucket. Raises ExportFailed."""
    try:
        return MergedModel(*read_output(open_store(place)))
    except (NoOutput, OSError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ExportFailed(f"{place}: {said}") from error


def _is_output(what: str) -> bool:
    """Whether it names where an ``output.uri`` has led: a bucket, or a directory with a model that is whole."""
    with contextlib.suppress(OSError):  # a name that is too long, say
        return "://" in what or (Path(what) / "output.json").is_file()
    return False


def _is_export(what: str) -> bool:
    """Whether it names a directory that an export has written."""
    with contextlib.suppress(OSError):
        names = {path.name for path in Path(what).iterdir()}
        weights = {"model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"}
        return "job.json" not in names and bool(names & weights)
    return False


@dataclass(frozen=True, slots=True)
class Written:
    """What an export has written. ``what``: model (for transformers), tensors (by name, of a loop of one's own) or
    adapter (PEFT's). ``versions``: of the fragments. ``check``: what using it showed; None: it was not used."""

    output: Path
    job: str
    what: str
    versions: Sequence[int]
    text: str
    check: Mapping[str, Any] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """For programs, as JSON takes it."""
        return {
            "output": str(self.output),
            "job": self.job,
            "what": self.what,
            "versions": {"min": min(self.versions), "max": max(self.versions)},
            "files": sorted(path.name for path in self.output.iterdir()),
            "check": self.check,
        }


def write_merged(model: MergedModel, out: Path, adapter: bool = False, check: bool = True) -> Written:
    """Write the new directory ``out``, whole or not at all. ``adapter``: of a job with LoRA the adapters alone.
    ``check``: use a model for transformers once it is written. Raises ExportFailed."""
    job, versions = model.job, model.versions
    at = f"fragments at versions {min(versions)} to {max(versions)}"
    name = job.metadata.name
    if adapter:
        layers = _write_adapter(model, out)
        text = f"{out}: the merged adapters of {layers} layers in PEFT's format, {at}"
        return Written(out, name, "adapter", versions, text=text)
    if job.spec.training.model is None:
        try:
            files = write_tensors(name, model.layout, model.tensors, versions, out=out)
        except FileExistsError as error:
            raise ExportFailed(f"{error.filename} {error.strerror}") from error
        except (OSError, SafetensorError) as error:  # safetensors has errors of its own for a disk that is full
            if isinstance(error, OSError):
                raise ExportFailed(unwritable_text(out, error)) from error
            raise ExportFailed(f"{out} cannot be written: {error}") from error
        elements = sum(values.size for values in model.tensors.values())
        text = (
            f"{out}: the merged parameters (the job has no training.model), {at}\n"
            f"{', '.join(files)}: {len(model.tensors)} tensors of {elements:,} elements in float32, by the names that "
            f"the program's own model gives them"
        )
        return Written(out, name, "tensors", versions, text=text)
    require_packages("diloco export of a transformers model", ["worker"])
    from diloco_worker.training.export import ExportError, export

    text = f"{out}: the merged model, {at}"
    try:
        export(job, model.tensors, out, directory=model.directory)
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error)) from error
    if not check:
        return Written(out, name, "model", versions, text=text)
    words, facts = _use(model, out)
    return Written(out, name, "model", versions, text=f"{text}\n{words}", check=facts)


def _use(model: MergedModel, out: Path) -> tuple[str, dict[str, Any]]:
    """Use what was written, in words and as a document. Raises ExportFailed, with exit code 1."""
    from diloco_worker.training.export import ExportError
    from diloco_worker.training.export_check import check_export

    cache = None if model.workdir is None else model.workdir / "cache"
    try:
        found = check_export(model.job, out, directory=model.directory, cache_directory=cache)
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error), FAILED) from error
    facts = {**asdict(found), "job_loss": model.score and model.score[1], "job_tokens": model.score and model.score[0]}
    made = "with the cache" if found.cached else "without a cache"
    ends = f", end token {', '.join(map(str, found.end))}" if found.end else ""
    words = f"checked: it loads{f' and generates {found.generated} tokens {made}{ends}' if found.generated else ''}"
    last = "" if model.score is None else f"; the job's last score: {model.score[1]:.4f}, at {model.score[0]:,} tokens"
    if found.loss is None:
        return f"{words}; not scored: {found.why}{last}", facts
    part = "" if found.batches == found.of else f" ({found.batches} of {found.of} batches)"
    words = f"{words}; loss {found.loss:.4f} nats on held-out data{part}{last}"
    if model.score is not None and not part:
        words += difference(found.loss, model.score, sum(model.versions))  # a merge makes one version of one fragment
    return words, facts


def difference(loss: float, score: tuple[int, float, int], merges: int) -> str:
    """What to say where the loss of an exported model of so many merges is not the job's last score."""
    if abs(loss - score[1]) <= MOST_DIFFERENCE * score[1]:
        return ""
    if score[2] < merges:
        return f"; {merges - score[2]:,} merges were made since"
    return "\nwarning: they differ, and are of the same merges: what was written is not what was trained"


def _write_adapter(model: MergedModel, out: Path) -> int:
    from diloco_worker.training.adapter_export import export_adapter
    from diloco_worker.training.export import ExportError

    try:
        return export_adapter(model.job, model.tensors, out, directory=model.directory)
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error)) from error


def read_model(store: Store, job: str) -> tuple[Layout, dict[str, NDArray[Any]], list[int]]:
    """The layout; every parameter of the merged model by name, float32; and the fragments' versions: those that
    a restart of the syncer would go on from.

    Raises ExportFailed, and what the store raises for damaged objects.
    """
    for last in [False] * (TRIES - 1) + [True]:
        reader = StoreReader(store, job)
        try:
            layout = reader.layout()
            if layout is None or reader.initial is None:
                raise ExportFailed("the store has no version 0 yet")
            chains = reader.newest(layout).chains
            if any(chain.unusable for chain in chains) and not last:
                continue  # damaged, or removed by the syncer while we read
            tensors = assemble(layout, [chain.newest.theta for chain in chains])
            if reader.initial["frozen"]:
                tensors |= _frozen(reader.blob(reader.initial["frozen"]))
            return layout, tensors, [chain.newest.version for chain in chains]
        except StoreUnusable as error:
            if last:
                raise ExportFailed(str(error)) from error
        except ObjectNotFound as error:
            if last:
                raise ExportFailed(f"the store lacks {error}: restore it from a copy") from error
    raise AssertionError("unreachable")


def assemble(layout: Layout, fragments: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Tensors by name from the fragments' flat vectors. Raises ExportFailed if a size is off."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    flat = {tensor.name: np.empty(tensor.elements, np.float32) for tensor in layout.tensors}
    for index, (pieces, theta) in enumerate(zip(layout.fragments, fragments, strict=True)):
        if theta.size != layout.elements(index):
            raise ExportFailed(f"fragment {index} has {theta.size} elements, the layout says {layout.elements(index)}")
        for piece in pieces:
            flat[piece.tensor][piece.start : piece.stop] = theta[piece.offset : piece.offset + piece.elements]
    return {name: values.reshape(shapes[name]) for name, values in flat.items()}


def _frozen(data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    try:
        entries, begin = frozen_entries(data)
    except NotSafetensors as error:
        raise ExportFailed(f"the store's frozen parameters cannot be read: {error}") from error
    return {
        entry.name: as_float32(data[begin + entry.start : begin + entry.stop].copy(), entry.dtype).reshape(entry.shape)
        for entry in entries
    }
