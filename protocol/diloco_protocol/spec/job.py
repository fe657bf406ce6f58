"""The DiLoCoJob: the one definition that the command line, the workers, the syncer and the operator read.

The models check types, ranges and unknown fields; ``rules`` checks what holds between fields. ``DiLoCoJob``
runs the rules itself, so that no job that breaks one exists as an object. ``load.read_job`` and
``load.load_job`` read a file and report all problems at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from diloco_protocol.spec.base import NAME_PATTERN, NAMESPACE_PATTERN, Annotations, Labels, Spec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.rules import violations
from diloco_protocol.spec.sync import SyncSpec
from diloco_protocol.spec.training import StopSpec
from diloco_protocol.vocabulary import API_VERSION

IMMUTABLE = (("training", "model"), ("training", "data"), ("seed",), ("sync", "fragments"))
"""Fields below spec that may not change once the job has started."""


class MetadataSpec(Spec):
    """Name, namespace and labels of the object."""

    name: str = Field(
        ...,
        pattern=NAME_PATTERN,
        max_length=30,
        examples=["tiny-gpt"],
        description="The job's name: lower-case letters, digits and dashes.",
    )
    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN, max_length=63)] | None = Field(
        None, description="Kubernetes namespace; `diloco run` ignores it."
    )
    labels: Labels = Field({}, description="Kubernetes labels.")
    annotations: Annotations = Field({}, description="Kubernetes annotations.")


class DiLoCoJob(Spec):
    """One training job."""

    api_version: Literal["diloco.io/v1alpha1"] = Field(
        ..., description="Version of this format.", examples=[API_VERSION]
    )
    kind: Literal["DiLoCoJob"] = Field(..., description="Always DiLoCoJob.", examples=["DiLoCoJob"])
    metadata: MetadataSpec = Field(
        ..., description="Name, namespace and labels of the object.", examples=[{"name": "job"}]
    )
    spec: JobSpec = Field(..., description="The job itself.", examples=[{"regions": [{"learners": 1}]}])

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get("skip_rules"):
            broken = [f"{'.'.join(map(str, v.path))}: {v.message}" for v in violations(self.spec)]
            if broken:
                raise ValueError("; ".join(broken))
        return self


def json_digest(value: Any) -> str:
    """SHA-256 (hex) of a value that JSON can hold, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def spec_digest(job: DiLoCoJob) -> str:
    """SHA-256 (hex) of the job's spec with all defaults filled in, independent of the order of keys."""
    return json_digest(job.spec.model_dump(mode="json"))


class SyncerSettings(BaseModel):
    """What a syncer tells each learner in its Welcome: the settings that take precedence over the learner's job file,
    because a job may be changed while learners run. ``learners``: slots of the job."""

    model_config = ConfigDict(frozen=True, strict=True)

    sync: SyncSpec
    learners: int
    stop: StopSpec

    @classmethod
    def of(cls, spec: JobSpec) -> SyncerSettings:
        """The settings in a job file."""
        return cls(sync=spec.sync, learners=spec.slots, stop=spec.training.stop)


def immutable_digests(job: DiLoCoJob) -> dict[str, str]:
    """Field path below spec → SHA-256 (hex), for each field of ``IMMUTABLE``.

    A learner sends them when it joins; one that differs is kept out (algorithm.md section 8, Drift).
    """
    spec = job.spec.model_dump(mode="json")
    return {".".join(path): json_digest(functools.reduce(operator.getitem, path, spec)) for path in IMMUTABLE}
