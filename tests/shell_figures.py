"""A shell that has nothing to say of the job."""

from __future__ import annotations

from diloco_syncer.core.documents import ShellFigures
from status_documents import NO_SECONDS, NO_TLS

SHELL = ShellFigures(
    job="j",
    store_problem="",
    sessions=0,
    links={},
    slot_bytes=lambda _: (0, 0),
    regions=[],
    refused_uploads={},
    tls=NO_TLS,
    merge_seconds=NO_SECONDS,
    events=[],
)
