"""The syncer's settings, which take precedence over this process's job file.

A job may be changed while learners run: its syncer is started again with the new job, and learners go on with the
file that they have. So each Welcome carries all of ``sync``, the stop and the number of learners. The rest (model,
data, optimizer) is read from the file, and what may not differ is compared by digests when a process joins.
"""

from __future__ import annotations

import logging

from pydantic import ValidationError

from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.spec.job_spec import JobSpec
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)


def read_settings(text: str) -> SyncerSettings | None:
    """Parse Welcome.settings; None: the job file is used. An empty text is None; so is one that is not understood (of
    an older or newer release), which is logged."""
    if not text:
        return None
    try:
        return SyncerSettings.model_validate_json(text)
    except ValidationError as error:
        log.warning("the syncer's settings are not understood, this process's own are used: %s", error)
        return None


def apply_settings(settings: SyncerSettings, spec: JobSpec) -> JobSpec:
    """``spec`` with the settings in it. Raises ConfigurationError for what a running process cannot change."""
    if settings.sync.deterministic != spec.sync.deterministic:
        raise ConfigurationError(
            f"sync.deterministic is {spec.sync.deterministic} in this process's job file and "
            f"{settings.sync.deterministic} at the syncer: apply the same job everywhere"
        )
    training = spec.training.model_copy(update={"stop": settings.stop})
    return spec.model_copy(update={"sync": settings.sync, "training": training})
