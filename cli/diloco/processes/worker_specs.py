"""Which processes a job is on this machine, with what environment; and what of the job
has no meaning here. Plain code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.processes.supervisor import Kind
from diloco.processes.workdir import Workdir
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import EVALUATOR

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
OF_THE_SYNCER = ("OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")  # threads of which it chooses the number itself
PASSED_ON = "DILOCO_LOG_LEVEL"

# Fields below spec that only a cluster reads; *: all of the section's.
CLUSTER_ONLY = (
    "suspend",
    "ttlSecondsAfterFinished",
    "suspendPolicy",
    "syncer.cluster",
    "syncer.endpoint.*",
    "syncer.tls.*",
    "syncer.storage.*",
    "syncer.podTemplate",
    "learners.credentials.*",
    "learners.podTemplate",
    "evaluator.podTemplate",
    "nodeLoss.*",
)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process of the job. ``name``: a learner's and a spare's is REGION-ORDINAL, as its pod's would end in a
    cluster. ``learner`` is its index over all of the job's learners; None for spares and the evaluator. ``ranks``: its
    processes, those of all its pods."""

    name: str
    kind: Kind
    region: str
    ordinal: int
    learner: int | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """A run whose learners are on other machines: here are the syncer and the evaluator.

    ``listen``: host:port for learners. ``credentials``: the syncer's directory, None: plaintext.
    ``evaluator``: whether there is one here; its credentials are a learner's.
    """

    listen: str
    credentials: Path | None = None
    evaluator: bool = True
    evaluator_credentials: Path | None = None


def served_worker_specs(job: DiLoCoJob, serving: ServeOptions) -> list[WorkerSpec]:
    """The worker processes beside a syncer that serves other machines."""
    return [m for m in worker_specs(job) if m.kind is Kind.EVALUATOR and serving.evaluator]


def worker_specs(job: DiLoCoJob) -> list[WorkerSpec]:
    """Learners of all regions, in the job's order, then spares, then the evaluator.

    Ordinals count within the region; spares come after its learners.
    """
    learners, spares = list[WorkerSpec](), list[WorkerSpec]()
    for region in job.spec.regions:
        ranks = job.spec.group(region.name).ranks
        for ordinal in range(region.learners + region.spares):
            name, spare = f"{region.name}-{ordinal}", ordinal >= region.learners
            number = None if spare else len(learners)
            worker = WorkerSpec(name, Kind.LEARNER, region.name, ordinal, learner=number, ranks=ranks)
            (spares if spare else learners).append(worker)
    evaluator = [WorkerSpec(EVALUATOR, Kind.EVALUATOR, job.spec.regions[0].name, 0)] if job.spec.evaluated else []
    return [*learners, *spares, *evaluator]


def learner_names(job: DiLoCoJob) -> list[str]:
    """The names of the job's learners, without spares, in the job's order."""
    return [worker.name for worker in worker_specs(job) if worker.learner is not None]


def threads_each(cores: int, learners: int) -> int:
    return max(1, cores // max(1, learners))


def base_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The runner's own environment without another job's settings (what is not a job's is passed on), with threads
    where the user has not said how many."""
    env = {key: value for key, value in environ.items() if key == PASSED_ON or not key.startswith("DILOCO_")}
    return {**{name: str(threads) for name in THREADS}, **env}


def syncer_environment(base: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """``base`` (``base_environment``) for the syncer, which uses the cores that learners leave: without the numbers of
    threads that are a learner's share and that the user has not said."""
    return {key: value for key, value in base.items() if key not in OF_THE_SYNCER or key in environ}


def syncer_command(workdir: Workdir, sync: str, control: str, http: str, serving: ServeOptions | None) -> list[str]:
    """The syncer's command line. ``sync``, ``control``, ``http``: the host:port that each server listens on."""
    options = {
        "--job": workdir.job,
        "--store": workdir.store,
        "--listen": sync,
        "--control": control,
        "--http": http,
        "--address-file": workdir.address,
        "--control-key-file": workdir.control_key,
    }
    if serving is not None and serving.credentials is not None:
        options["--credentials"] = serving.credentials
    else:
        options["--join-token-file"] = workdir.join_token
    return [sys.executable, "-m", "diloco_syncer", *(str(word) for option in options.items() for word in option)]


def worker_environment(
    worker: WorkerSpec, process: str, workdir: Workdir, job_directory: Path, syncer: str | None, gpu: str | None
) -> dict[str, str]:
    """``DILOCO_*`` of one process (docs/contracts.md). ``process``: its identity, empty: it draws one. ``syncer``:
    host:port, None: it reads the address file. ``gpu``: the device that it shall see, or those of its ranks."""
    env = {
        "DILOCO_JOB_FILE": str(workdir.job),
        "DILOCO_JOB_DIRECTORY": str(job_directory),
        "DILOCO_ROLE": "evaluator" if worker.kind is Kind.EVALUATOR else "learner",
        "DILOCO_REGION": worker.region,
        "DILOCO_ORDINAL": str(worker.ordinal),
        "DILOCO_PROCESS": process,
        "DILOCO_WORKDIR": str(workdir.path),
        "DILOCO_IDLE_AT_END": "0",
    }
    env |= {"DILOCO_SYNCER_FILE": str(workdir.address)} if syncer is None else {"DILOCO_SYNCER": syncer}
    return env if gpu is None else {**env, "CUDA_VISIBLE_DEVICES": gpu}


def gpus(environ: Mapping[str, str], device_names: Iterable[str]) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; found without CUDA, which must not be initialised
    before the fork. ``device_names``: what is in /dev."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return sorted((n[6:] for n in device_names if n.startswith("nvidia") and n[6:].isdigit()), key=int)


def gpus_of(worker: WorkerSpec, workers: Sequence[WorkerSpec], names: Sequence[str]) -> str:
    """The GPUs that a worker sees, one for each rank as far as there are so many; workers take them in turn."""
    first = sum(other.ranks for other in workers[: workers.index(worker)])
    places = dict.fromkeys((first + rank) % len(names) for rank in range(worker.ranks))
    return ",".join(names[place] for place in places)


def without_meaning(job: DiLoCoJob) -> list[str]:
    """Fields set away from their default that nothing reads on one machine."""
    given = job.model_dump(mode="json", exclude_defaults=True)
    found = [f"metadata.{key}" for key in ("namespace", "labels", "annotations") if key in given["metadata"]]
    for path in CLUSTER_ONLY:
        *sections, last = path.split(".")
        within = given["spec"]
        for section in sections:
            within = within.get(section, {})
        found += [path.replace("*", key) for key in (within if last == "*" else [last]) if key in within]
    for index, region in enumerate(given["spec"]["regions"]):
        found += [f"regions.{index}.{key}" for key in ("cluster", "podTemplate") if region.get(key)]
    return found
