"""``diloco export``: the merged model of a run as a directory that transformers loads.

Reads the store beside whoever writes it, so a run may be going on: of every fragment it
takes the newest durable version, as a restart of the syncer would, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.workdir import Workdir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from diloco_protocol.layout import Layout
    from diloco_syncer.store import Store

TRIES = 5  # a running syncer may remove a version just as it is read


class ExportFailed(Exception):
    """Nothing was written; the message says why and the cure."""


def export_run(workdir: Workdir, out: Path) -> list[int]:
    """Write the run's merged model to ``out``; returns the fragments' versions. Raises ExportFailed."""
    from diloco_protocol.files import FileError
    from diloco_protocol.load import JobError, read_job
    from diloco_syncer.records import Damaged, FormatRefused
    from diloco_syncer.store import DirectoryStore

    try:
        job = read_job(workdir.job)
        if not (workdir.store / "initial.json").is_file():
            raise ExportFailed(f"{workdir.path} holds no model yet: its run has not got to version 0")
        store = DirectoryStore(workdir.store)
        tensors, versions = read_model(store, job.metadata.name)
    except FileNotFoundError as error:
        raise ExportFailed(f"{workdir.path} is no run's directory: {error.filename} is missing") from error
    except (Damaged, FormatRefused, FileError, JobError, OSError) as error:
        raise ExportFailed(str(error)) from error
    if job.spec.training.model is None:
        raise ExportFailed(
            "the job has no spec.training.model: only its own program (learners.command) can build it"
        )
    from diloco_worker.export import ExportError, export

    try:
        export(job, tensors, out, directory=workdir.job_directory())
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error)) from error
    return versions


def read_model(store: Store, job: str) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Every parameter of the merged model by name, float32 (frozen ones in their own dtype where
    numpy has it), and the fragments' versions.

    Raises ExportFailed, and what the store raises for damaged objects.
    """
    from diloco_protocol.layout import Layout
    from diloco_syncer import records
    from diloco_syncer.documents import read_document
    from diloco_syncer.store import NotThere

    for last in [False] * (TRIES - 1) + [True]:
        try:
            initial = read_document(store, "initial.json")
            raw = records.unpack(store.read(initial["layout"], records.MAX_FILE), "blob", initial["layout"])[
                1
            ]
            layout = Layout.from_json(raw["blob"].tobytes())
            versions = newest_versions(store, len(layout.fragments))
            fragments = []
            for fragment, version in enumerate(versions):
                name = (
                    initial["fragments"][fragment] if version == 0 else records.record_name(fragment, version)
                )
                record = records.MergeRecord.unpack(store.read(name, records.MAX_FILE), name)
                if (record.job, record.fragment, record.version) != (job, fragment, version):
                    raise ExportFailed(f"{name} holds another fragment than its name says: restore the store")
                fragments.append(record.theta)
            tensors = assemble(layout, fragments)
            if initial["frozen"]:
                blob = records.unpack(
                    store.read(initial["frozen"], records.MAX_FILE), "blob", initial["frozen"]
                )[1]
                tensors |= _frozen(blob["blob"].tobytes())
            return tensors, versions
        except NotThere as error:
            if last:
                raise ExportFailed(f"the store lacks {error}: restore it from a copy") from error
    raise AssertionError("unreachable")


def newest_versions(store: Store, fragments: int) -> list[int]:
    """Per fragment: the newest valid state's version, and what was merged after it without a gap."""
    from diloco_syncer.documents import read_document
    from diloco_syncer.records import Damaged, parse_record_name

    versions = [0] * fragments
    for name in reversed(store.names("state")):
        try:
            found = read_document(store, name)["versions"]
        except Damaged:
            continue  # the one before it serves, as at a restart
        versions = list(found) or versions
        break
    there = {parsed for name in store.names("records") if (parsed := parse_record_name(name))}
    for fragment in range(fragments):
        while (fragment, versions[fragment] + 1) in there:
            versions[fragment] += 1
    return versions


def assemble(layout: Layout, fragments: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Tensors by name from the fragments' flat vectors. Raises ExportFailed if a size is off."""
    import numpy as np

    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    flat = {tensor.name: np.empty(tensor.elements, np.float32) for tensor in layout.tensors}
    for index, (pieces, theta) in enumerate(zip(layout.fragments, fragments, strict=True)):
        if theta.size != layout.elements(index):
            raise ExportFailed(
                f"fragment {index} has {theta.size} elements, the layout says {layout.elements(index)}"
            )
        for piece in pieces:
            flat[piece.tensor][piece.start : piece.stop] = theta[piece.offset : piece.offset + piece.elements]
    return {name: values.reshape(shapes[name]) for name, values in flat.items()}


def _frozen(data: bytes) -> dict[str, NDArray[Any]]:
    from safetensors.torch import load  # numpy has no bfloat16

    return {name: tensor.float().numpy() for name, tensor in load(data).items()}
