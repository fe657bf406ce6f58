"""The job as it is handed to whoever joins with credentials and without a job file.

All of it but what only pods need: templates may hold words that are the cluster's own.
"""

from __future__ import annotations

import json

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json


def handout(job: DiLoCoJob) -> bytes:
    """The normal form, UTF-8."""
    document = json.loads(job_to_json(job))
    document["metadata"]["annotations"] = {}
    spec = document["spec"]
    for part in (spec["syncer"], spec["learners"], *spec["regions"]):
        part["podTemplate"] = {}
    return json.dumps(document, ensure_ascii=False).encode()
