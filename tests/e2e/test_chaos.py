"""5. Whatever a job is made of is killed, deleted, edited, scaled and relabelled at random, for minutes.

Meanwhile the job's status is read each second and compared with what the syncer and the API server say. Environment:
CHAOS_MINUTES (default 10) and CHAOS_SEED.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from .clusters import Cluster
from .conftest import SYSTEM
from .jobs import Job, clock
from .random_deeds import Chaos
from .true_status import Looks

MINUTES = float(os.environ.get("CHAOS_MINUTES", "10"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
LAG_SECONDS = 60.0
"""The longest that a sentence of the status may be untrue while an operator leads; the longest seen is printed."""


@pytest.mark.promise(
    "Under random kills, deletions and edits no learner that works is taken, everything is put back, the status is "
    "true, and the job completes with an exact ledger"
)
@pytest.mark.timeout(60 * MINUTES + 1500)
def test_a_job_under_random_faults_completes_and_its_status_is_true(cluster: Cluster, start: Any) -> None:
    patient = {"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 60}, "staleness": {"maxVersions": 100_000}}
    job: Job = start("hurt", learners=3, sync=patient)
    job.in_merges(3)
    chaos = Chaos(job, SYSTEM, random.Random(SEED))
    looks = Looks(job, SYSTEM, chaos.excused)
    with looks:
        end = clock() + 60 * MINUTES
        while clock() < end:
            time.sleep(chaos.pause())
            print(f"{clock():.0f} {chaos.do_something()}", flush=True)
        print(f"deeds: {chaos.counts()}", flush=True)
        job.in_merges(3, timeout=300)
        job.merging_on(merges=20, timeout=120)
        job.wait_condition("Ready", timeout=120)
        looks.wait_until_all_is_true(timeout=2 * LAG_SECONDS)
    looks.print_lags()
    assert not looks.taken, "pods that worked were taken"
    assert not looks.ahead, "the status told of merges that the store did not have"
    late = {name: lag for name, lag in looks.lags().items() if lag.led > LAG_SECONDS}
    assert not late, "the status was untrue for so many seconds while an operator led"
    job.exact()
    job.patch({"spec": {"training": {"stop": {"tokens": job.training()["tokens"]["trained"] + 50_000}}}})
    job.wait_condition("Complete", timeout=300)
    job.exact()
    syncer = job.syncer_pod()["metadata"]["name"]
    words = ("exec", "-n", job.namespace, syncer, "--", "diloco", "audit", "file:///var/lib/diloco/store")
    said = cluster.kubectl(*words, timeout=300)
    print(said)
    assert "everything holds" in said
