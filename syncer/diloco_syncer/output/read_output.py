"""Reads a merged model back that ``model_output`` has written, every file checked against ``output.json``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco_protocol.arrays.layout import Layout, LayoutError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, job_from_json
from diloco_syncer.output.model_file import NotSafetensors, frozen_entries
from diloco_syncer.output.model_output import JOB, LAYOUT, MANIFEST, MAX_DOCUMENT
from diloco_syncer.store.base import ObjectNotFound, Store


class NoOutput(Exception):
    """No whole model lies there; the message says why, and the cure."""


def read_output(place: Store) -> tuple[DiLoCoJob, Layout, dict[str, NDArray[Any]], list[int]]:
    """The job (without podTemplates), the layout, every parameter by name (float32, in its shape), and the fragments'
    versions. Raises NoOutput, OSError."""
    try:
        manifest = json.loads(place.read(MANIFEST, MAX_DOCUMENT))
        files = {str(name): (int(row["bytes"]), str(row["xxh3"])) for name, row in manifest["files"].items()}
        versions = [int(version) for version in manifest["versions"]]
    except ObjectNotFound as error:
        raise NoOutput(f"there is no {MANIFEST}: it is written last, so the model is not whole yet") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoOutput(f"{MANIFEST} is not what this program writes ({error!r})") from error
    tensors: dict[str, NDArray[Any]] = {}
    try:
        job = job_from_json(_read(place, JOB, files))
        layout = Layout.from_json(_read(place, LAYOUT, files))
        for name in files:
            if name.endswith(".safetensors"):
                tensors |= _tensors(np.frombuffer(_read(place, name, files), np.uint8))
    except KeyError as error:
        raise NoOutput(f"{MANIFEST} does not name {error}") from error
    except (JobError, LayoutError, NotSafetensors) as error:
        raise NoOutput(str(error)) from error
    return job, layout, tensors, versions


def _read(place: Store, name: str, files: dict[str, tuple[int, str]]) -> bytes:
    size, digest = files[name]
    try:
        data = place.read(name, size)
    except ObjectNotFound as error:
        raise NoOutput(f"{name} is missing, which {MANIFEST} names: restore it, or train the job on") from error
    if len(data) != size or xxhash.xxh3_64_hexdigest(data) != digest:
        raise NoOutput(f"{name} is not what was written: its size or checksum differs from {MANIFEST}")
    return data


def _tensors(data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    entries, begin = frozen_entries(data)
    return {
        entry.name: data[begin + entry.start : begin + entry.stop].view("<f4").reshape(entry.shape) for entry in entries
    }
