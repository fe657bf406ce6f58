"""A link that is too slow is named; on one machine that has more to do than processors, the machine is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.bandwidth.links import Measured
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import SlotState
from diloco_syncer.server.links import busy_text, slot_links

JOB = """{"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "j"}, "spec": {
"regions": [{"name": "r", "learners": 1}], "learners": {"command": ["python", "x.py"]},
"training": {"stop": {"steps": 9}}}}"""


def slow_link(busy: str) -> Any:
    slot: Any = SimpleNamespace(index=0, state=SlotState.ACTIVE, holder=SimpleNamespace(ready=True), step_seconds=0.05)
    link: Any = SimpleNamespace(known=Measured(up=1e5, down=1e5), missing_fragments=0)
    layout = Layout.build([Tensor("w", (256, 256), "float32")], 1)
    return slot_links(parse_job(JOB), layout, [slot], lambda _: link, busy=busy)[0]


@pytest.mark.promise(
    "On one machine that is busy no link is called slow: the load is named, and fewer learners", section="Syncer"
)
def test_on_a_busy_machine_no_link_is_blamed() -> None:
    assert slow_link("").too_slow and "a faster link" in slow_link("").message
    busy = slow_link(busy_text(40.0, 2))
    assert not busy.too_slow and "load 40 on 2 processors" in busy.message
