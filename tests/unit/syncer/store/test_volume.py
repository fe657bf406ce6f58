"""The store never holds more than ``diloco_protocol.resources`` says of the volume that it needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.resources import STATE_EVERY, record_floats, versions_kept
from diloco_protocol.spec.load import job_from_json
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import MergeRecord

ELEMENTS = 50_000  # of a fragment: what is beside the arrays does not count
HEAD = '"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "job"}'
SPEC = """"training": {"stop": {"steps": 9}}, "learners": {"command": ["true"]}, "regions": [{"learners": 1}],
"sync": {"fragments": %d, "every": 24}"""


@pytest.mark.promise(
    "If a job's memory or volume is too small for its model, the job names the field, once; the bound for "
    "the volume is the store's own"
)
@pytest.mark.parametrize(("fragments", "merges_a_checkpoint"), [(1, 50), (6, 7), (20, 5), (20, 50)])
def test_the_records_that_are_kept_fit_the_volume(tmp_path: Path, fragments: int, merges_a_checkpoint: int) -> None:
    spec = job_from_json('{%s, "spec": {%s}}' % (HEAD, SPEC % fragments)).spec  # noqa: UP031
    store = DirectoryStore(tmp_path / "store")
    checkpoints = Checkpoints(store, Epoch.claim(store, b"{}", 0), "job", spec.syncer.checkpoint.keep)
    layout = Layout.build([Tensor("w", (fragments * ELEMENTS,), "float32", False)], fragments)
    checkpoints.commit_initial(layout.to_json(), [f"initial/{p}" for p in range(fragments)], "")
    versions, most, since = [0] * len(layout), 0, 0
    for number in range(4 * max(STATE_EVERY, fragments)):
        fragment = number % fragments
        versions[fragment] += 1
        theta = np.zeros(layout.elements(fragment), np.float32)
        outer = {"momentum": theta} if record_floats(spec.sync) == 2 else {}
        checkpoints.write_record(
            MergeRecord("job", 1, fragment, versions[fragment], theta=theta, outer=outer, number=number)
        )
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "store" / "records").iterdir()))
        since += 1
        if since >= max(STATE_EVERY, fragments):  # as Merger does
            since = 0
            checkpoints.write_state({}, versions)
            checkpoints.collect("")
        if number % merges_a_checkpoint == 0:  # as Durability.checkpoint does
            checkpoints.write_manifest({}, versions, "")
            checkpoints.collect("")
    for _ in range(spec.syncer.checkpoint.keep):  # nothing is merged for long
        checkpoints.write_manifest({}, versions, "")
        checkpoints.collect("")
    assert len(store.list("records")) == 2 * fragments, "the newest of each fragment, and the one before it"
    need = versions_kept(spec, fragments) * 4 * record_floats(spec.sync) * fragments * ELEMENTS
    assert most <= 1.02 * need, "the volume would be full"
    if merges_a_checkpoint == 50:
        assert most > 0.3 * need, "the volume would be much too large"
