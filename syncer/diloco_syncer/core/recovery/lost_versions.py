"""What to do when the store lost data: take newer fragments from those who hold them.

Theory of operation (algorithm.md section 8). Whoever joins says which version of
each fragment it holds, and under which epoch's label. A base (epoch e, version h)
is *newer* than the store's version s if it extends the store's own history:

- h > s, and e is an earlier epoch than this syncer's (this syncer made none above s),
- e is no earlier than the epoch in which s was made, and
- no epoch after e has settled (``history``): once a syncer went on without a version, that
  version belongs to another history, and nobody may bring it back. Where the store has
  forgotten that, whoever was told of it says so at Join.

That can only be between a restart and the first merge after it (``open``). If such a
base is found, or the tape tells of versions that the store has not, the loss is
*known*, and the job waits: no push is taken, training does not go on, and a
process is not told of the store's older version of a fragment that it holds newer, or it
would throw away what is wanted of it. When every slot that had a process has one
again or was given up, the holder of the newest version of each fragment is asked
for it, the next one if it does not answer. What came is durable as a record of
its own kind, and the syncer begins again from its store: there the version and its receipt
are applied like any other record (``receipts``). If nobody has anything, the job goes on from
what the store has; what learners know to be merged beyond it is dropped (``rolled-back``).

Where also the store's epochs went back (it was restored from a copy), learners hold
epochs that this syncer has not reached: it begins again above them, so that one
(epoch, version) never has two meanings.

Plain code, driven by ``core``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol.vocabulary import EventKind, JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import Action
from diloco_syncer.core.recovery.receipts import Rows, contradiction
from diloco_syncer.core.state import JobState

ASK_SECONDS = 60.0  # for an answer, besides the transfer
SLOWEST = 64 << 10  # elements a second
EPOCHS_ABOVE = 1000  # as far as a store's epochs are believed to have gone back


@dataclass(frozen=True, slots=True)
class VersionRequest:
    """A base that was asked for."""

    connection: int
    fragment: int
    epoch: int
    version: int
    deadline: float


class VersionRecovery:
    """What was lost, who has it, and who was asked for it."""

    def __init__(self, job: JobState) -> None:
        self.job = job
        self.known = False
        self.made: list[int] = []  # per fragment, the epoch of its newest version
        # connection -> fragment -> (version, epoch, the newest epoch that had settled by then)
        self.holders: dict[int, dict[int, tuple[int, int, int]]] = {}
        self.asked: dict[int, VersionRequest] = {}
        self.taken: set[int] = set()
        self.withheld: set[int] = set()  # fragments of which somebody was not told
        self.welcomed: set[str] = set()  # processes that this syncer has admitted
        self.ending = False

    @property
    def open(self) -> bool:
        """Whether newer versions may still be taken."""
        job = self.job
        waiting = job.phase in (JobPhase.WAITING, JobPhase.DRAINING)
        return bool(self.made) and waiting and job.history.settled < job.epoch

    @property
    def settling(self) -> bool:
        """Whether everything waits until it is settled what the store lost."""
        return self.known and self.open

    def start(self, made: Sequence[int], behind: bool) -> None:
        """``made``: the epoch of each fragment's newest version, empty before version 0; ``behind``:
        the tape tells of more than the store has."""
        self.made = list(made)
        if behind and self.open:
            self._notice("the tape tells of merges that the store has not")

    def _notice(self, why: str) -> None:
        if self.known:
            return
        job = self.job
        self.known = True
        if job.leases:
            job.leases.skip()
        message = f"the store has lost data ({why}): learners are asked for what they hold"
        if job.phase is JobPhase.WAITING:
            job.phase_message = message
            job.out.append(ev.SetPhase(job.phase, message))
        job.note(EventKind.LOST_DATA, None, message)

    # ------------------------------------------------------------- who holds what

    def strange_epoch(self, join: ev.Join) -> int:
        """The newest epoch that it holds, if this syncer cannot have told it; else 0."""
        newest = max((epoch for epoch, _ in join.held), default=0)
        return newest if newest >= self.job.epoch and join.process not in self.welcomed else 0

    def joined(self, join: ev.Join) -> frozenset[int]:
        """Remember what it holds; the fragments of which it is not to be told."""
        self.welcomed.add(join.process)
        self.holders.pop(join.connection, None)
        if not self.open or {len(join.held), len(join.settled)} != {len(self.job.versions)}:
            return frozenset()
        if self.job.history.hear(max(join.settled)):
            self._sort_out()
        if self.foreign(join):
            return frozenset()
        newer = {
            fragment: (version, epoch, settled)
            for fragment, ((epoch, version), settled) in enumerate(zip(join.held, join.settled, strict=True))
            if version > self.job.versions[fragment] and not self._past(fragment, version, epoch)
        }
        if newer:
            self.holders[join.connection] = {p: row for p, row in newer.items() if self._extends(p, *row)}
            self.withheld |= newer.keys()
            self._notice(f"{join.region}-{join.ordinal} holds newer versions, of fragments: {len(newer)}")
        return frozenset(newer)

    def foreign(self, join: ev.Join) -> bool:
        """Whether its work is of another history than the store's."""
        return any(map(self.job.history.foreign, join.settled))

    def _past(self, fragment: int, version: int, epoch: int) -> bool:
        """Whether the store knows that it went on without this version. Where it does not, nobody who
        holds it is told of an older one: what others hold may be above it, and it must not drop it."""
        went_on = (versions for e, versions in self.job.epochs if e > epoch and e in self.job.history.epochs)
        return any(versions[fragment] < version for versions in went_on)

    def _extends(self, fragment: int, version: int, epoch: int, told: int) -> bool:
        """Whether this version, held under ``epoch`` when ``told`` had settled last, extends the store's
        history. Of an epoch after the newest settled one, but told before: it did not know of that."""
        job, settled = self.job, self.job.history.settled
        return max(self.made[fragment], settled) <= epoch < job.epoch and settled in (told, epoch)

    def _sort_out(self) -> None:
        """An epoch had settled of which the store knew nothing: keep what extends that history."""
        for held in self.holders.values():
            for fragment, row in list(held.items()):
                if not self._extends(fragment, *row):
                    del held[fragment]
        self.asked = {p: ask for p, ask in self.asked.items() if p in self.holders.get(ask.connection, {})}

    def gone(self, connection: int) -> None:
        """The connection will not answer any more."""
        self.holders.pop(connection, None)
        self.asked = {p: ask for p, ask in self.asked.items() if ask.connection != connection}

    # ------------------------------------------------------------- asking

    def admit(self, connection: int, fragment: int, epoch: int, version: int, rows: Rows) -> str:
        """Whether this base may come: empty, or why not."""
        ask = self.asked.get(fragment)
        if ask is None or (ask.connection, ask.epoch, ask.version) != (connection, epoch, version):
            return f"nobody asked this process for version {version} of fragment {fragment}"
        return contradiction(self.job, fragment, version, rows)

    def failed(self, connection: int, fragment: int) -> None:
        """It cannot give that base: ask the next."""
        ask = self.asked.get(fragment)
        if ask is not None and ask.connection == connection:
            del self.asked[fragment]
            self.holders.get(connection, {}).pop(fragment, None)

    def stored(self, fragment: int) -> None:
        """A record with the base is durable."""
        self.asked.pop(fragment, None)
        self.taken.add(fragment)
        self.job.history.take(self.job.epoch)

    def advance(self, now: float) -> list[Action]:
        if not self.settling or self.ending or not self._all_here():
            return []
        for ask in list(self.asked.values()):
            if now >= ask.deadline:
                self.failed(ask.connection, ask.fragment)
        out: list[Action] = []
        for fragment in range(len(self.made)):
            if fragment not in self.taken and fragment not in self.asked:
                out += self._ask(fragment, now)
        if self.asked or self._waiting():
            return out
        if self.taken:
            self.ending = True
            return [*out, ev.RestartFromStore(f"fragments taken from learners: {len(self.taken)}", 0)]
        return out + self._give_up()

    def _all_here(self) -> bool:
        """Whether everybody who may hold something is connected or was given up."""
        slots = self.job.members.slots
        if any(slot.occupied and slot.connection is None for slot in slots):
            return False
        here = sum(slot.occupied for slot in slots)
        return self.job.phase is not JobPhase.WAITING or here >= self.job.config.rules.quorum

    def _waiting(self) -> bool:
        """Whether somebody can still be asked for something."""
        return any(held.keys() - self.taken for held in self.holders.values())

    def _ask(self, fragment: int, now: float) -> list[Action]:
        busy = {ask.connection for ask in self.asked.values()}
        holding = [(held[fragment], -c) for c, held in self.holders.items() if fragment in held]
        if not holding:
            return []
        (version, epoch, _), negative = max(holding)
        if -negative in busy:
            return []  # one at a time
        deadline = now + ASK_SECONDS + self.job.fragment_elements[fragment] / SLOWEST
        self.asked[fragment] = VersionRequest(-negative, fragment, epoch, version, deadline)
        return [ev.RequestVersion(-negative, fragment, epoch, version)]

    def _give_up(self) -> list[Action]:
        """Nobody has anything: this is the history from now on."""
        job = self.job
        job.history.settle(job.epoch)
        job.phase_message = "what the store lost is not to be had"
        job.note(EventKind.LOST_DATA, None, f"{job.phase_message}: going on from versions {job.versions}")
        told = [job.announce(fragment) for fragment in sorted(self.withheld)]
        return [ev.Persist(), ev.SetPhase(job.phase, job.phase_message), *told]
