"""Writes the merged model of a complete job to ``spec.output.uri``: a directory or a bucket.

There lie ``model.safetensors``, or its shards with their index, every parameter under its own name, float32;
``layout.json``, ``job.json`` (without podTemplates, which may hold secrets), ``report.json``; and last of all
``output.json``, which names every file with its size and xxh3-64. Whoever finds ``output.json`` finds a whole model; an
older one is removed before anything is overwritten.

A file is made while it is written, so the model is not in memory twice: a put holds on to the parameters themselves,
and to float32 copies of frozen ones of at most one shard.

What fails is tried again, with growing pauses, until ``PATIENCE`` seconds have passed without a file that got through.
Files of another job, or of nobody, are never overwritten.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import Buffer, NotWritable
from diloco_protocol.documents import OutputRow
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_syncer.output.model_file import ModelFile
from diloco_syncer.output.shards import INDEX, WHOLE, index_text, split_names
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.open import open_store

log = logging.getLogger(__name__)
T = TypeVar("T")

SHARD_BYTES = 10**9
PATIENCE = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MANIFEST, JOB, LAYOUT, REPORT = "output.json", "job.json", "layout.json", "report.json"
MAX_DOCUMENT = 64 << 20


class OutputRefused(Exception):
    """The place cannot be used as it is; the message has the cure."""


@dataclass(slots=True)
class ModelOutput:
    """One job's output. ``row``: what became of it so far, for status and report."""

    job: DiLoCoJob
    check_epoch: Callable[[], None]  # raises HigherEpoch; blocks
    row: OutputRow
    patience: float = PATIENCE
    _progress_at: float = 0.0  # monotonic seconds: when a file last got through

    @classmethod
    def of(cls, job: DiLoCoJob, check_epoch: Callable[[], None]) -> ModelOutput | None:
        """The output that the job asks for; None: it asks for none."""
        uri = job.spec.output.uri
        return None if uri is None else cls(job, check_epoch, OutputRow(uri=uri, state="waiting"))

    async def write(self, layout: Layout, file: ModelFile, versions: Sequence[int], report: bytes) -> None:
        """Write everything, or set ``row`` to why not. Raises HigherEpoch, and then the successor writes it."""
        self.row = OutputRow(uri=self.row.uri, state="writing")
        self._progress_at = time.monotonic()
        try:
            size = await self._write_all(layout, file, versions, report)
        except (OutputRefused, OSError) as error:
            problem = _in_words(error)
            cure = "correct it and start the syncer again, or change output.uri"
            self.row = self.row.model_copy(update={"state": "failed", "message": f"{problem}; {cure}"})
            log.error("the merged model was not written to %s: %s", self.row.uri, problem)
            return
        self.row = OutputRow(uri=self.row.uri, state="written", size=size)
        log.info("the merged model was written to %s: %d bytes", self.row.uri, size)

    async def _write_all(self, layout: Layout, file: ModelFile, versions: Sequence[int], report: bytes) -> int:
        place = await self._try(open_store, self.row.uri, True)
        old = await self._try(_claim, place, self.job.metadata.name)
        sizes = file.sizes
        shards = split_names(sizes, SHARD_BYTES)
        files: dict[str, dict[str, Any]] = {}

        async def put(name: str, parts: Callable[[], Iterator[Buffer]]) -> None:
            files[name] = await self._try(_put, place, name, parts)

        await put(JOB, lambda: iter([job_to_json(without_templates(self.job)).encode()]))
        await put(LAYOUT, lambda: iter([layout.to_json().encode()]))
        await put(REPORT, lambda: iter([report]))
        for name, tensors in shards.items():
            await put(name, file.select(tensors).chunks)
        if len(shards) > 1:
            await put(INDEX, lambda: iter([index_text(shards, sizes).encode()]))
        document = {"job": self.job.metadata.name, "layout": layout.digest, "versions": list(versions), "files": files}
        for name in set(old) - set(files):
            await self._try(place.delete, name)
        await self._try(self.check_epoch)
        await self._try(place.replace, MANIFEST, json.dumps(document, indent=1).encode() + b"\n")
        return sum(int(row["bytes"]) for row in files.values())

    async def _try(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in a thread until it gets through. Raises OSError when patience ends, OutputRefused at once."""
        pause = FIRST_PAUSE
        while True:
            try:
                result = await asyncio.to_thread(work, *arguments)
            except OSError as error:
                waited = time.monotonic() - self._progress_at
                final = isinstance(error, NotWritable) and error.errno != errno.EIO  # not a service that is away
                if final or waited > self.patience:
                    raise
                self.row = self.row.model_copy(update={"message": _in_words(error)})
                log.warning("the merged model is not written to %s yet: %s", self.row.uri, _in_words(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            self._progress_at = time.monotonic()
            if self.row.message:
                self.row = self.row.model_copy(update={"message": ""})
            return result


def _in_words(error: Exception) -> str:
    """The error's message; a store names its own field in it."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return str(said).replace("syncer.storage.uri", "output.uri")


def _claim(place: Store, job: str) -> list[str]:
    """Take the place for this job: what lies there is no whole output from now on. Returns the files of an earlier one.

    Raises OutputRefused if something else lies there.
    """
    found, owner = _document(place, MANIFEST), _document(place, JOB)
    name = found.get("job") or (owner.get("metadata") or {}).get("name")
    if name is None and any(place.exists(file) for file in (MANIFEST, JOB, WHOLE, INDEX, "config.json")):
        raise OutputRefused("other files lie there: give output.uri a folder of its own")
    if name not in (None, job):
        raise OutputRefused(f"the model of the job {name} lies there: give output.uri a folder of its own")
    place.delete(MANIFEST)
    return list(found.get("files") or ())


def _document(place: Store, name: str) -> dict[str, Any]:
    """A JSON object; empty: there is none."""
    try:
        found = json.loads(place.read(name, MAX_DOCUMENT))
    except (ObjectNotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _put(place: Store, name: str, parts: Callable[[], Iterator[Buffer]]) -> dict[str, Any]:
    """Write one file; returns its row in the manifest."""
    whole, digest, size = list(parts()), xxhash.xxh3_64(), 0
    for part in whole:
        digest.update(part)
        size += memoryview(part).nbytes
    place.replace(name, *whole)
    return {"bytes": size, "xxh3": digest.hexdigest()}


def without_templates(job: DiLoCoJob) -> DiLoCoJob:
    """The job without its podTemplates, whose environment may hold secrets."""
    spec, none = job.spec, dict[str, Any](pod_template={})
    shard_pods = spec.syncer.shard_pods.model_copy(update=none) if spec.syncer.shard_pods is not None else None
    update = {
        "syncer": spec.syncer.model_copy(update={**none, "shard_pods": shard_pods}),
        "learners": spec.learners.model_copy(update=none),
        "evaluator": spec.evaluator.model_copy(update=none),
        "regions": [region.model_copy(update=none) for region in spec.regions],
    }
    return job.model_copy(update={"spec": spec.model_copy(update=update)})
