"""What was found out about a job before its start, as one process tells another. Nothing here loads torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from diloco_protocol.spec.load import Problem

VARIABLE = "DILOCO_CHECK"
"""Names the file that a worker process is to write its findings to, instead of training."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The job's model. ``kind``: its class. ``parameters``: all of them, ``trained`` those that are trained.
    ``bytes``: of all as a learner holds them. ``fragments``: elements of each. ``note``: what of the job's fragments
    was lowered and why."""

    kind: str
    parameters: int
    trained: int
    bytes: int
    fragments: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class JobFindings:
    """``wrong``: problems of the job, wherever it runs. ``here``: what this machine lacks for it. ``unchecked``: what
    could not be looked at, and why. ``device``: cpu or cuda; empty: not known. ``step_tokens``: of one step of every
    learner; ``steps``: those of each learner until training.stop; None: not known. ``doubts``: warnings.
    ``data``: what the training data hold, for people; ``data_in_part``: only their beginning was read.
    ``device_bytes``: memory of the smallest GPU here; 0: there is none, or the job does not use it."""

    wrong: tuple[Problem, ...] = ()
    here: tuple[Problem, ...] = ()
    unchecked: tuple[str, ...] = ()
    model: ModelFacts | None = None
    device: str = ""
    step_tokens: int | None = None
    steps: int | None = None
    doubts: tuple[Problem, ...] = ()
    data: str = ""
    data_in_part: bool = False
    device_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> JobFindings:
        """Raises ValueError, KeyError or TypeError for what is none."""
        found: dict[str, Any] = json.loads(text)
        for name in ("wrong", "here", "doubts"):
            found[name] = tuple(Problem(**one) for one in found[name])
        if (model := found["model"]) is not None:
            found["model"] = ModelFacts(**{**model, "fragments": tuple(model["fragments"])})
        return cls(**{**found, "unchecked": tuple(found["unchecked"])})
