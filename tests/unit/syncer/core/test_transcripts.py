"""The core's main stories as text: transcripts/*.txt, in which events and time go in and actions come out.

A line at the margin is a remark (``#``), the job (``config``), an event by its name in events.py, ``after N s``, or
``crash`` (of the syncer, which begins again from what its store has). Indented below it are the actions that
followed, without empty fields; this test makes them and compares. After a change that is meant:

    REWRITE_TRANSCRIPTS=1 pytest tests/unit/syncer/core/test_transcripts.py

writes them anew, and ``git diff`` shows what became different.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire.records import FragmentReport, Held, PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core

TRANSCRIPTS = Path(__file__).parent / "transcripts"
ENCODING, LAYOUT = "float32", "L"
TOKENS_PER_STEP, SECONDS_PER_STEP = 10, 1.0


class Story:
    """One core, and what its shell would have in the store."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 0
        self.saved: dict[str, Any] | None = None
        self.merging: tuple[PushHeader, ...] = ()
        self.records: dict[tuple[int, int], tuple[PushHeader, ...]] = {}  # of merges, by fragment and version
        self.offers: dict[int, PushHeader] = {}  # spooled and not merged, by handle
        self.received: dict[int, PushHeader] = {}
        self.handles = 0

    def play(self, line: str) -> list[ev.Action]:
        """Carry out a line; the actions that followed."""
        verb, *words = shlex.split(line)
        if verb == "after":
            self.now += float(words[0])
            return self.handle(ev.Tick())
        given = {name: json_or_text(value) for name, value in (word.split("=", 1) for word in words)}
        if verb == "config":
            self.configure(**given)
            return self.begin()
        if verb == "crash":
            return self.begin()
        make: Callable[..., ev.Event] = getattr(self, f"make_{verb}", None) or getattr(ev, verb)
        return self.handle(make(**given))

    def configure(
        self,
        learners: int,
        quorum: int,
        every: int,
        grace_seconds: float,
        max_versions: int = 4,
        heartbeat_timeout: float = 10,
    ) -> None:
        sync = {
            "fragments": 1,
            "every": every,
            "overlap": 1,
            "quorum": quorum,
            "grace": {"capSeconds": grace_seconds},
            "staleness": {"maxVersions": max_versions},
            "heartbeat": {"timeoutSeconds": heartbeat_timeout},
            "compression": {"up": ENCODING},
        }
        spec = {
            "training": {"stop": {"steps": 1000}, "evaluation": None},
            "learners": {"command": ["true"]},
            "regions": [{"name": "r", "learners": learners}],
            "sync": sync,
        }
        job = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "job"}, "spec": spec}
        self.config = replace(CoreConfig.from_job(DiLoCoJob.model_validate(job)), digests={})

    def begin(self) -> list[ev.Action]:
        """A syncer process starts, and reads the store as ``store/restore.py`` does."""
        self.epoch += 1
        self.core = Core(self.config, self.saved, self.epoch, self.now, wall=self.now)
        versions = self.core.versions
        newer = {key: headers for key, headers in sorted(self.records.items()) if key[1] > versions[key[0]]}
        self.core.close_superseded_tenures([*sum(newer.values(), ()), *self.offers.values()], [])
        for (fragment, version), headers in newer.items():
            self.core.apply_record(fragment, version, headers, self.epoch - 1)
        for handle, header in list(self.offers.items()):
            if not self.core.restore_offer(header, handle, 1.0):
                del self.offers[handle]
        return self.carry_out(self.core.start(self.now, [self.epoch - 1] * len(self.core.versions)))

    def handle(self, event: ev.Event) -> list[ev.Action]:
        return self.carry_out(self.core.handle(event, self.now))

    def carry_out(self, actions: list[ev.Action]) -> list[ev.Action]:
        """Keep what is to be durable."""
        for action in actions:
            match action:
                case ev.Persist():
                    self.saved = json.loads(json.dumps(self.core.state(self.now, self.now)))
                case ev.AnswerPush(offer=True):
                    self.offers[action.handle] = self.received[action.handle]
                case ev.ReleasePush():
                    self.offers.pop(action.handle, None)
                case ev.Merge():
                    self.merging = tuple(responder.header for responder in action.responders)
        return actions

    # ------------------------------------------------------------- events that need more words than a line should have

    def make_Join(
        self, connection: int, process: str, ordinal: int, held: list[list[int]] | None = None, **other: Any
    ) -> ev.Event:
        versions = tuple(Held(epoch, version) for epoch, version in held or ())
        return ev.Join(
            connection,
            process,
            "r",
            ordinal,
            evaluator=False,
            layout_digest=LAYOUT,
            digests={},
            sequences=0,
            held=versions,
            **other,
        )

    def make_InitialModelStored(self) -> ev.Event:
        return ev.InitialModelStored(LAYOUT, (8,))

    def make_Reported(self, connection: int, **counts: int) -> ev.Event:
        return ev.Reported(connection, self.counts(**counts))

    def counts(self, step: int, since: int = 0, base: int = 0, confirmed: int = 0, dropped: int = 0) -> StepReport:
        """``step``: the slot's, of which this tenure trained those after ``since``. Of these steps its learner knows
        that ``confirmed`` were merged, and dropped ``dropped`` as too old."""
        trained = step - since
        pending = trained - confirmed - dropped
        tokens = [steps * TOKENS_PER_STEP for steps in (trained, pending, confirmed, dropped)]
        row = FragmentReport(
            self.epoch if base else 1, base, trained, tokens[1], confirmed_tokens=tokens[2], dropped_stale=tokens[3]
        )
        return StepReport(step, trained, tokens[0], (row,), step_seconds=SECONDS_PER_STEP)

    def make_PushReceived(
        self, slot: int, steps: str, sequence: int = 1, base: int = 0, since: int = 0, round: int = -1, **of: Any
    ) -> ev.Event:
        """``steps``: the first and the last; ``round``: the open one, where none is named."""
        first, last = map(int, steps.split("-"))
        if round < 0:
            opened = self.core.open_rounds.get(0)
            round = opened.id if opened else 0
        count = last - first + 1
        incarnation = of.pop("incarnation", self.core.slots[slot].holder.incarnation)
        header = PushHeader(
            0,
            sequence,
            round,
            self.epoch,
            base_version=base,
            oldest_version=base,
            first_step=first,
            last_step=last,
            steps=count,
            tokens=count * TOKENS_PER_STEP,
            compute_seconds=1.0,
            encoding=ENCODING,
            layout_digest=LAYOUT,
            report=self.counts(last, since, base),
            slot=slot,
            incarnation=incarnation,
        )
        self.handles += 1
        self.received[self.handles] = header
        return ev.PushReceived(header, of.pop("norm", 1.0), of.pop("finite", True), self.handles)

    def make_MergeDurable(self, version: int) -> ev.Event:
        self.records[0, version] = self.merging
        return ev.MergeDurable(0, version, 0.1, (1.0,) * len(self.merging))

    def make_EndRequested(self, phase: str, message: str) -> ev.Event:
        return ev.EndRequested(JobPhase(phase), message)


def json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def words(value: Any) -> str:
    """A field's value on one line."""
    match value:
        case PushHeader():
            return f"(slot {value.slot}, steps {value.first_step}-{value.last_step})"
        case tuple() | list():
            return "[" + ", ".join(map(words, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {words(one)}" for key, one in value.items()) + "}"
        case float():
            return f"{value:.3g}"
        case str():
            return json.dumps(value) if " " in value else value
    return f"({described(value)})" if is_dataclass(value) else str(value)


def described(value: Any) -> str:
    """A dataclass's fields, without those that are empty."""
    shown = {f.name: getattr(value, f.name) for f in fields(value)}
    return " ".join(f"{k}={words(v)}" for k, v in shown.items() if type(v) is int or (v is not None and v not in EMPTY))


EMPTY: tuple[Any, ...] = (False, "", (), {}, frozenset())


def shown(action: ev.Action) -> str:
    if isinstance(action, ev.RecordEvent):  # whose message has the rest
        return f"    RecordEvent {action.kind}: {action.message}"
    return f"    {type(action).__name__} {described(action)}".rstrip()


def played(text: str) -> str:
    """The transcript with the actions that follow today."""
    story, lines = Story(), list[str]()
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [shown(action) for action in story.play(line)] or ["    (nothing)"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_transcript_is_what_the_core_does(path: Path) -> None:
    before = path.read_text(encoding="utf-8")
    after = played(before)
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(after, encoding="utf-8")
    else:
        assert after == before, f"REWRITE_TRANSCRIPTS=1 writes {path.name} anew"
