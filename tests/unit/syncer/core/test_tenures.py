"""Reports count in the tenure in which they were made, and in no other."""

from __future__ import annotations

from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire.records import FragmentReport, PushHeader, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.merging.rounds import RoundRules
from ledger_balance import imbalances

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


def join(core: Core, connection: int, **fields: int) -> Seat:
    return seat_of(core.handle(ev.Join(connection, "p", "r", 0, False, "L", {}, 0, (), **fields), 0.0))


def counted(tenure: int, step: int, trained: int, base: int = 0, confirmed: int = 0) -> StepReport:
    """``trained`` steps of the tenure, ten tokens each, of which ``confirmed`` tokens are known to be merged."""
    row = FragmentReport(1, base, trained - confirmed // 10, 10 * trained - confirmed, confirmed)
    return StepReport(step, trained, 10 * trained, (row,), step_seconds=0.1, tenure=tenure)


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
        0, 1, core.open_rounds[0].id, 1, 0, 0, 1, 4, 4, 40, 1.0, "float32", "L", report, 0, seat.incarnation
    )
    core.handle(ev.PushReceived(header, 1.0, True, handle=7), 0.0)
    core.handle(ev.MergeDurable(0, 1, 0.1, (1.0,)), 0.0)
    core.handle(ev.Reported(1, counted(seat.tenure, 6, 6, base=1, confirmed=40)), 0.0)
    return core, seat


def test_a_report_of_the_tenure_before_changes_nothing() -> None:
    core, first = begun()
    seat = join(core, 2)  # the same process holds no work any more: the slot is given to it anew
    assert not seat.continuing and seat.tenure == seat.incarnation > first.tenure
    assert core.ledger is not None
    core.handle(ev.Reported(2, counted(first.tenure, 6, 6, base=1, confirmed=40)), 0.0)  # made before it heard
    assert core.ledger.dropped(0, 0) == {"died": 20} and core.ledger.pending(0, 0) == 0
    assert not core.slots[0].ready, "it has no base yet"
    core.handle(ev.Reported(2, counted(seat.tenure, 7, 1, base=1)), 0.0)
    assert core.ledger.trained(0) == 70 and core.ledger.pending(0, 0) == 10 and not imbalances(core.ledger)
    assert core.slots[0].ready and core.slots[0].step == 7


def test_a_push_of_the_tenure_before_is_fenced_under_whatever_incarnation() -> None:
    core, first = begun()
    seat = join(core, 2)
    core.handle(ev.Reported(2, counted(seat.tenure, 6, 0, base=1)), 0.0)
    late = counted(first.tenure, 6, 6, base=1, confirmed=40)  # planned before it heard, sent after it did
    header = PushHeader(0, 2, 0, 1, 1, 1, 5, 6, 2, 20, 1.0, "float32", "L", late, 0, seat.incarnation)
    refusal = core.check_push(header)
    assert refusal is not None and refusal[0] is PushRefusal.FENCED and "tenure" in refusal[1]


def test_a_tenure_keeps_its_number_over_reconnects_also_of_a_process_that_never_heard_it() -> None:
    core, first = begun()
    assert first.tenure == first.incarnation
    again = join(core, 2, previous_incarnation=first.incarnation, tenure=first.tenure)
    assert again.continuing and again.incarnation > first.incarnation and again.tenure == first.tenure
    deaf = join(core, 3, previous_incarnation=first.incarnation)
    assert deaf.continuing and deaf.tenure == first.tenure
    core.handle(ev.Reported(3, counted(deaf.tenure, 9, 9, base=1, confirmed=40)), 0.0)
    assert core.ledger is not None and core.ledger.pending(0, 0) == 50 and not imbalances(core.ledger)
