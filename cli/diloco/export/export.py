"""``diloco export``: the merged model of a run as a directory that transformers loads.

A job without ``training.model`` has a model that only its own program knows: of such a one the parameters are written,
with the layout (tensors.py).

Reads the store beside whoever writes it, so a run may be going on: of every fragment it
takes the newest durable version, as a restart of the syncer would, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.console import CommandError, print_text
from diloco.export.remote_model import RemoteModelError, fetch_layout, fetch_model
from diloco.export.tensors import write_tensors
from diloco.processes.workdir import Workdir
from diloco_protocol.arrays.layout import MAX_JSON_BYTES, Layout, LayoutError
from diloco_protocol.common.files import FileError, read_bounded
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, read_job
from diloco_syncer.output.model_file import NotSafetensors, as_float32, frozen_entries
from diloco_syncer.output.read_output import NoOutput, read_output
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import Damaged, FormatRefused
from diloco_syncer.store.restore import StoreReader, StoreUnusable

TRIES = 5  # a running syncer may remove a version just as it is read


class ExportFailed(CommandError):
    """Nothing was written; the message says why and the cure."""


def export_run(workdir: Workdir, out: Path) -> None:
    """Write the run's merged model to ``out``. Raises ExportFailed."""
    try:
        job = read_job(workdir.job)
        if not (workdir.store / "initial.json").is_file():
            raise ExportFailed(f"{workdir.path} holds no model yet: its run has not got to version 0")
        store = DirectoryStore(workdir.store)
        layout, tensors, versions = read_model(store, job.metadata.name)
    except FileNotFoundError as error:
        raise ExportFailed(f"{workdir.path} is no run's directory: {error.filename} is missing") from error
    except (Damaged, FormatRefused, FileError, JobError, OSError) as error:
        raise ExportFailed(str(error)) from error
    _write_model(job, layout, tensors, versions, out, workdir.job_directory())


def export_url(url: str, out: Path, progress: Callable[[int, int], None]) -> None:
    """The same from a syncer's export listener (remote_model.py). Raises ExportFailed."""
    try:
        job, tensors, versions = fetch_model(url, progress)
        layout = fetch_layout(url)
    except RemoteModelError as error:
        raise ExportFailed(str(error)) from error
    _write_model(job, layout, tensors, versions, out, None)


def export_output(place: str, out: Path) -> None:
    """The same from where ``output.uri`` has led: a directory or a bucket. Raises ExportFailed."""
    try:
        job, layout, tensors, versions = read_output(open_store(place))
    except (NoOutput, OSError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ExportFailed(f"{place}: {said}") from error
    _write_model(job, layout, tensors, versions, out, None)


def _write_model(
    job: DiLoCoJob,
    layout: Layout,
    tensors: Mapping[str, NDArray[Any]],
    versions: Sequence[int],
    out: Path,
    directory: Path | None,
) -> None:
    """Write the directory, and say so. ``directory``: where the job's relative paths start."""
    at = f"fragments at versions {min(versions)} to {max(versions)}"
    if job.spec.training.model is None:
        try:
            write_tensors(job.metadata.name, layout, tensors, versions, out)
        except FileExistsError as error:
            raise ExportFailed(f"{error.filename} {error.strerror}") from error
        except OSError as error:
            raise ExportFailed(f"{out} cannot be written: {error.strerror or error}") from error
        print_text(f"{out}: the merged parameters (the job has no training.model), {at}")
        return
    from diloco_worker.training.export import ExportError, export

    try:
        export(job, tensors, out, directory=directory)
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error)) from error
    print_text(f"{out}: the merged model, {at}")


def read_layout(path: Path) -> Layout:
    """The layout in a layout.json, in the directory of an export, or in that of a run. Raises ExportFailed."""
    file = path / "layout.json" if path.is_dir() else path
    try:
        if file.is_file() or not path.is_dir():
            return Layout.from_json(read_bounded(file, MAX_JSON_BYTES))
        workdir = Workdir(path)
        layout = StoreReader(DirectoryStore(workdir.store), read_job(workdir.job).metadata.name).layout()
    except (JobError, LayoutError, OSError, StoreUnusable) as error:
        raise ExportFailed(
            f"{path} holds no layout ({error}): give the directory of a run or of an export of one"
        ) from error
    if layout is None:
        raise ExportFailed(f"{path} holds no model yet: its run has not got to version 0")
    return layout


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
