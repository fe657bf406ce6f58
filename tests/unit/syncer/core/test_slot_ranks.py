"""What the status says of a learner of several ranks."""

from __future__ import annotations

import json
from dataclasses import replace

from diloco_protocol.wire.records import RanksReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from one_slot import CONFIG, counted, join
from shell_figures import SHELL


def test_a_learner_is_one_row_with_its_ranks_and_the_slowest() -> None:
    core = Core(CONFIG, None, 1, 0.0)
    core.start(0.0)
    seat = join(core, 1)
    core.handle(ev.InitialModelStored("L", (8,)), 0.0)

    def shown(step: int, ranks: RanksReport | None) -> tuple[int, int | None, float | None]:
        core.handle(ev.Reported(1, replace(counted(seat.tenure, step, step), ranks=ranks)), 0.0)
        (row,) = core.status(0.0, SHELL).slots
        return row.ranks, row.slowest_rank, row.slowest_rank_seconds

    assert shown(0, RanksReport(4, 0, 0.0)) == (4, None, None), "nobody is slow before a step"
    assert shown(2, RanksReport(4, 3, 0.5)) == (4, 3, 0.5)
    saved = json.loads(json.dumps(core.state(0.0)))
    assert Core(CONFIG, saved, 2, 0.0).status(0.0, SHELL).slots[0].ranks == 1, "until a report says it again"
    assert shown(3, None) == (1, None, None)
