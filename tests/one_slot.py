"""A core with one slot and one fragment, and what its one learner says to it."""

from __future__ import annotations

from diloco_protocol.wire.records import FragmentReport, LeaseCursor, PushHeader, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core

CONFIG = CoreConfig(
    places=(("r", 0),),
    rules=RoundRules(every=4, overlap=1, quorum=1, grace_factor=0.9, grace_cap=5.0),
    encoding="float32",
    stop=("steps", 1000),
    max_versions=4,
)


def seat_of(actions: list[ev.Action]) -> Seat:
    (seat,) = [action.seat for action in actions if isinstance(action, ev.Admit)]
    assert seat is not None
    return seat


def join(core: Core, connection: int, sequences: int = 0, **fields: int) -> Seat:
    return seat_of(
        core.handle(
            ev.Join(
                connection,
                "p",
                "r",
                0,
                evaluator=False,
                layout_digest="L",
                digests={},
                sequences=sequences,
                held=(),
                **fields,
            ),
            0.0,
        )
    )


def counted(
    tenure: int, step: int, trained: int, base: int = 0, confirmed: int = 0, cursors: tuple[LeaseCursor, ...] = ()
) -> StepReport:
    """``trained`` steps of the tenure, ten tokens each, of which ``confirmed`` tokens are known to be merged."""
    row = FragmentReport(1, base, trained - confirmed // 10, 10 * trained - confirmed, confirmed_tokens=confirmed)
    return StepReport(step, trained, 10 * trained, (row,), step_seconds=0.1, cursors=cursors, tenure=tenure)


def begun() -> tuple[Core, Seat]:
    """A core whose one learner has trained 6 steps, 4 of which are merged and confirmed."""
    core = Core(CONFIG, None, 1, 0.0)
    core.start(0.0)
    seat = join(core, 1)
    core.handle(ev.InitialModelStored("L", (8,)), 0.0)
    core.handle(ev.Reported(1, counted(seat.tenure, 0, 0)), 0.0)
    report = counted(seat.tenure, 4, 4)
    core.handle(ev.Reported(1, report), 0.0)
    header = PushHeader(
        0,
        1,
        core.open_rounds[0].id,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=40,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=report,
        slot=0,
        incarnation=seat.incarnation,
    )
    core.handle(ev.PushReceived(header, 1.0, True, handle=7), 0.0)
    core.handle(ev.MergeDurable(0, 1, 0.1, (1.0,)), 0.0)
    core.handle(ev.Reported(1, counted(seat.tenure, 6, 6, base=1, confirmed=40)), 0.0)
    return core, seat
