"""The job as learners download it: those that join with credentials and without a job file.

It lacks what only pods need: pod templates and annotations may hold what is not for learners elsewhere.
"""

from __future__ import annotations

import json

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json


def job_for_learners(job: DiLoCoJob) -> bytes:
    """The job's normal form without pod templates and annotations, JSON in UTF-8."""
    document = json.loads(job_to_json(job))
    document["metadata"]["annotations"] = {}
    spec = document["spec"]
    for part in (spec["syncer"], spec["learners"], *spec["regions"]):
        part["podTemplate"] = {}
    return json.dumps(document, ensure_ascii=False).encode()
