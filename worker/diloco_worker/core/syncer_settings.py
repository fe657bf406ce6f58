"""The syncer's settings, which take precedence over this process's job file.

A job may be changed while learners run: its syncer is started again with the new job, and learners go on with the
file that they have. So each Welcome carries all of ``sync``, the stop and the number of learners. The rest (model,
data, optimizer) is read from the file, and what may not differ is compared by digests when a process joins.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.sync import SyncSpec
from diloco_protocol.spec.training import StopSpec
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncerSettings:
    """The content of Welcome.settings. ``learners``: slots of the job."""

    sync: SyncSpec
    learners: int
    stop: StopSpec

    @classmethod
    def read(cls, text: str) -> SyncerSettings | None:
        """Parse JSON; None: the job file is used. An empty text is None; so is one that is not understood (of an older
        or newer release), which is logged."""
        if not text:
            return None
        try:
            document = json.loads(text)
            return cls(
                SyncSpec.model_validate_json(json.dumps(document["sync"])),
                int(document["learners"]),
                StopSpec.model_validate_json(json.dumps(document["stop"])),
            )
        except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("the syncer's settings are not understood, this process's own are used: %s", error)
            return None

    @classmethod
    def of(cls, spec: JobSpec) -> SyncerSettings:
        """The settings of the process's own job file."""
        return cls(spec.sync, spec.slots, spec.training.stop)

    def document(self) -> dict[str, Any]:
        """As JSON, in the form of Welcome.settings."""
        return {
            "sync": self.sync.model_dump(mode="json", by_alias=True),
            "learners": self.learners,
            "stop": self.stop.model_dump(mode="json", by_alias=True),
        }

    def applied(self, spec: JobSpec) -> JobSpec:
        """``spec`` with these settings in it. Raises ConfigurationError for what a running process cannot change."""
        if self.sync.deterministic != spec.sync.deterministic:
            raise ConfigurationError(
                f"sync.deterministic is {spec.sync.deterministic} in this process's job file and "
                f"{self.sync.deterministic} at the syncer: apply the same job everywhere"
            )
        training = spec.training.model_copy(update={"stop": self.stop})
        return spec.model_copy(update={"sync": self.sync, "training": training})
