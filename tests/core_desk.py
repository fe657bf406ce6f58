"""A syncer's core with a hand on every lever, for tests of one situation each. Not a test."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core

A = TypeVar("A")


def config(slots: int = 2, quorum: int = 1, **changes: object) -> CoreConfig:
    base = CoreConfig(
        places=tuple(("r", i) for i in range(slots)),
        rules=RoundRules(every=4, overlap=1, quorum=quorum, grace_factor=0.9, grace_cap=5.0),
        encoding="float32",
        stop=("steps", 1000),
        max_versions=4,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Desk:
    """A core with a hand on every lever; time stands still unless told."""

    def __init__(self, config: CoreConfig, state: dict | None = None, epoch: int = 1) -> None:
        self.core = Core(config, state, epoch, 0.0, wall=0.0)
        self.now = 0.0
        self.log: list[ev.Action] = list(self.core.start(0.0))

    def do(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, self.now)
        self.log += actions
        return actions

    def later(self, seconds: float) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def join(self, connection: int, ordinal: int, process: str = "", **changes: object) -> list[ev.Action]:
        join = ev.Join(
            connection,
            process or f"p{connection}",
            "r",
            ordinal,
            evaluator=False,
            layout_digest="L",
            digests={},
            sequences=0,
            held=(),
        )
        return self.do(replace(join, **changes))  # type: ignore[arg-type]

    def begin(self, learners: int, fragments: int = 1) -> None:
        """Learners on connections 1.., version 0, everybody reported."""
        for i in range(learners):
            self.join(i + 1, i)
        self.do(ev.InitialModelStored("L", (8,) * fragments))
        for i in range(learners):
            self.report(i + 1, 0)

    def report(self, connection: int, step: int, base: int = 0, confirmed: int = 0, epoch: int = 1) -> list[ev.Action]:
        return self.do(ev.Reported(connection, report(step, base, confirmed, epoch, fragments=len(self.core.versions))))

    def header(self, slot_index: int, last: int, **changes: object) -> PushHeader:
        opened = self.core.open_rounds.get(0)
        header = PushHeader(
            0,
            1,
            opened.id if opened else 0,
            1,
            base_version=0,
            oldest_version=0,
            first_step=1,
            last_step=last,
            steps=last,
            tokens=last * 10,
            compute_seconds=1.0,
            encoding="float32",
            layout_digest="L",
            report=report(last, fragments=len(self.core.versions)),
            slot=slot_index,
            incarnation=self.core.slots[slot_index].holder.incarnation,
        )
        return replace(header, **changes)  # type: ignore[arg-type]

    def push(self, slot: int, last: int, norm: float = 1.0, finite: bool = True, **changes: object) -> list[ev.Action]:
        return self.do(ev.PushReceived(self.header(slot, last, **changes), norm, finite, handle=100 + slot))


def report(step: int, base: int = 0, confirmed: int = 0, epoch: int = 1, fragments: int = 1) -> StepReport:
    counts = FragmentReport(epoch, base, step, step * 10 - confirmed, confirmed_tokens=confirmed)
    return StepReport(step, step, step * 10, (counts,) * fragments, step_seconds=0.1)


def of(actions: list[ev.Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def reason(actions: list[ev.Action]) -> PushRefusal | None:
    (verdict,) = of(actions, ev.AnswerPush)
    return verdict.reason
