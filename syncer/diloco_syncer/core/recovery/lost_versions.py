"""What the store lost, which learners hold it, and which of them is asked for it.

Theory of operation (algorithm.md section 8; the package's docstring tells the whole story). At Join a learner names,
for each fragment, the version h that it holds, the epoch e under which it was announced, and the newest epoch that
had settled then. With s the store's version, made in epoch m, the learner's version *extends* the store's lineage if

- h > s and e is below this syncer's epoch, for this syncer made nothing above s;
- m <= e, so that it was made no earlier than the store's own;
- no epoch after e has settled: once a syncer went on without a version, that version is another lineage's.

This is decided between a restart and the first merge after it (``can_recover``). When such a version shows up, or
the tape tells of versions that the store has not, the loss is *announced*, and everything waits (``is_pending``).
When all learners are back or given up, each missing fragment is requested from a holder of its newest version, one
request per learner at a time, of several at once. One that sends nothing for ``ANSWER_SECONDS`` is given up. One whose
answer takes longer than ``SLOWEST`` would is given up for another that holds the version; where there is none, only
after ``ALONE`` times as long. What is not proved to be a version that was announced (``not_believed``) is
not taken, and not asked for again. A version that came whole and makes sense is *accepted*: the store may have it from
then on, so whatever becomes of its learner, everything waits until its record is durable. If no learner had
anything, tokens that learners know to be merged beyond the store's versions are dropped (``rolled-back``).

Where the store's epochs went back too, learners hold epochs that this syncer has not reached: it restarts
above them, so that one (epoch, version) never has two meanings.

A *rebuild* is the same for a store that came back empty, or that has no whole version of some fragments left. Version
0 of these then has stand-ins (``STAND_IN``), from which
the job never goes on: it waits for learners that hold the fragments. A learner that holds nothing but version 0 may
be the first one back, before those that hold more: it gives version 0 back only when all are there, or none came for
``rebuild_seconds``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco_protocol.vocabulary import EventKind, JobPhase
from diloco_protocol.wire.records import Held, Receipt
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.recovery.receipts import validate_receipt
from diloco_syncer.core.state import JobState

ANSWER_SECONDS = 60.0  # without a byte of an answer
RETRY_SECONDS = 10.0  # before a holder that failed is asked again, where nobody else has the version
SLOWEST = 64 << 10  # elements a second
ALONE = 16  # times as long as this may the only holder take
STAND_IN = 0  # the epoch of a version 0 that stands in for a later version: no epoch makes a version in it
FIRST_EPOCH = 1  # the epoch of a version 0 that a learner gave back: not later than any that a learner holds


@dataclass(frozen=True, slots=True)
class VersionRequest:
    connection: int
    fragment: int
    epoch: int
    version: int
    deadline: float  # for all of it, decoded, where another holds it too
    last_deadline: float  # where nobody else does
    idle_until: float  # for its next byte


class VersionRecovery:
    """The search for versions that the store lost."""

    def __init__(self, state: JobState, actions: Actions) -> None:
        self._state = state
        self._actions = actions
        self._announced = False  # whether a loss is known
        self._rebuilding = False
        self._taken_back = False  # whether the saved state told of versions that the store has lost
        self._rebuild_until: float | None = None  # how long a rebuild waits for more learners
        self._made: list[int] = []  # per fragment, the epoch of its newest version
        self._held: dict[int, dict[int, Held]] = {}  # connection -> fragment -> what extends the lineage
        self._origins: dict[int, list[int]] = {}  # connection -> fragment -> epoch of its bases as version 0
        self._requests: dict[int, VersionRequest] = {}  # by fragment
        self._retry_at: dict[tuple[int, int], float] = {}  # (connection, fragment) that failed, in a rebuild
        self._accepted: set[int] = set()  # fragments whose records are being made durable
        self._recovered: set[int] = set()  # fragments
        self._withheld: set[int] = set()  # fragments that some learner was not told of
        self._welcomed: set[str] = set()  # processes that this syncer has admitted
        self._disbelieved: set[str] = set()  # processes that gave back what was never announced
        self._restarting = False
        self._skipped_leases = False

    @property
    def can_recover(self) -> bool:
        """Whether newer versions may still be recovered: nothing was merged or given up in this epoch."""
        state = self._state
        begun = bool(self._made) or not state.initialised
        waiting = state.phase in (JobPhase.WAITING, JobPhase.DRAINING)
        return begun and waiting and state.lineage.newest_settled < state.epoch

    @property
    def is_pending(self) -> bool:
        """Whether everything waits until it is decided what the store lost."""
        return self._announced and self.can_recover

    def mark_taken_back(self) -> None:
        """The store has lost a version that the saved state tells of."""
        self._taken_back = True

    def start(self, made: Sequence[int], behind: bool) -> None:
        """The store was read. ``made``: the epoch of each fragment's newest version, empty before version 0;
        ``behind``: the tape tells of more than the store has."""
        self._made = list(made)
        self._rebuilding = STAND_IN in self._made
        if self._rebuilding and (self._taken_back or any(self._state.versions)):
            self._announce_loss(f"it has no whole version of fragments {self._stood_in_for()}")
        elif self._rebuilding:
            self._announce_loss("it was emptied")
            self._actions.record_event(
                EventKind.LOST_DATA,
                None,
                "no learner knows the outer optimizer's momentum, the order of the data, the scores, or the tokens "
                "dropped in tenures that are over: these start anew; the job's time is what its merged steps took",
            )
        elif (behind or self._taken_back) and self.can_recover:
            self._announce_loss("its state or its tape tells of merges that it does not have")

    def _announce_loss(self, why: str) -> None:
        if self._announced:
            return
        state = self._state
        self._announced = True
        self._skip_lease_numbers()
        message = f"the store has lost data ({why}): the syncer asks learners for what they hold"
        if state.phase is JobPhase.WAITING:
            self._set_message(message)
        self._actions.record_event(EventKind.LOST_DATA, None, message)

    def _skip_lease_numbers(self) -> None:
        """Never give a number to a lease again that a state which was lost has given."""
        if self._state.leases and not self._skipped_leases:
            self._skipped_leases = True
            self._state.leases.skip_numbers()

    def _set_message(self, message: str) -> bool:
        """Say what is waited for; whether it is news."""
        if message == self._state.phase_message:
            return False
        self._state.phase_message = message
        self._actions.add(ev.SetPhase(self._state.phase, message))
        return True

    # ------------------------------------------------------------- when the job may go on

    def begin_training(self) -> bool:
        """Training begins, and with it this epoch is settled; False: it has to wait for what the store lost."""
        if self.is_pending:
            return False
        self._state.lineage.mark_settled(self._state.epoch)
        return True

    def begin_last_merges(self, target: JobPhase) -> bool:
        """The last merges before ``target`` begin; False: they have to wait for what the store lost."""
        # A rebuild may be suspended, and goes on after a resume; it never ends in a complete job.
        if self.is_rebuilding and target is JobPhase.SUSPENDED:
            return True
        if self.is_pending:
            return False
        state = self._state
        if state.initialised and state.lineage.newest_settled < state.epoch:
            state.lineage.mark_settled(state.epoch)  # what the last merges make comes from no learner
            self._actions.add(ev.Persist())
        return True

    # ------------------------------------------------------------- a store that came back empty

    @property
    def is_rebuilding(self) -> bool:
        """Whether the store came back empty, and some fragments are still stood in for."""
        return self._rebuilding and self.can_recover

    def origins(self, connection: int) -> tuple[int, ...]:
        """What the bases are that this connection uploads as version 0: per fragment the epoch for the record,
        ``STAND_IN`` or ``FIRST_EPOCH``; empty: the job is new, and they are its version 0."""
        return tuple(self._origins.get(connection, ()))

    def is_of_lost_model(self, join: ev.Join) -> bool:
        """Whether a process tells an empty store of a model that was in it. An evaluator's version 0 proves nothing
        that could be given back."""
        return bool(join.held) and (not join.evaluator or any(held.version for held in join.held))

    def may_give_version_0(self, connection: int, now: float) -> bool:
        """Whether this connection may upload version 0 of a store that came back empty."""
        origins = self._origins.get(connection, [])
        if STAND_IN in origins:
            return True
        others = any(STAND_IN in each for each in self._origins.values())
        return bool(origins) and not others and self._all_present(now)

    def standby_holders(self, now: float) -> list[int]:
        """Who may upload version 0 of a store that came back empty though it has no slot: the connections that stand by
        and hold the model. Empty as long as a learner that may hold it, in a slot, is waited for."""
        standby = self._state.members.standby if self.is_rebuilding and self._all_present(now) else ()
        return [connection for connection in standby if self.may_give_version_0(connection, now)]

    def _register_for_rebuild(self, join: ev.Join) -> None:
        """Nothing is in the store, and a learner holds versions."""
        self._rebuilding = True
        self._state.lineage.learn_settled(max((held.settled for held in join.held), default=0), emptied=True)
        if join.process not in self._disbelieved:
            self._origins[join.connection] = [STAND_IN if held.version else FIRST_EPOCH for held in join.held]
        what = "merged versions" if any(held.version for held in join.held) else "version 0"
        self._announce_loss(f"it is empty, and {join.region}-{join.ordinal} holds {what}")

    def hold_back_version_0(self) -> bool:
        """Version 0's place is taken; whether by what a learner gave back, and nobody goes on from before a restart."""
        if self._rebuilding and self.can_recover:
            self._restarting = True
            self._actions.add(ev.RestartFromStore("an empty store is rebuilt from what learners hold", 0))
        return self._rebuilding

    # ------------------------------------------------------------- which learner holds what

    def unknown_epoch(self, join: ev.Join) -> int:
        """The newest epoch that a learner holds, if this syncer cannot have announced it; else 0."""
        newest = max((held.epoch for held in join.held), default=0)
        return newest if newest >= self._state.epoch and join.process not in self._welcomed else 0

    def register_holder(self, join: ev.Join) -> frozenset[int]:
        """Remember what a learner holds; returns the fragments that it must not be told of."""
        state = self._state
        self._welcomed.add(join.process)
        self.forget_connection(join.connection)
        if not self.can_recover:
            return frozenset()
        if not state.initialised:
            if self.is_of_lost_model(join):
                self._register_for_rebuild(join)
            return frozenset()
        stand_ins = frozenset(p for p, epoch in enumerate(self._made) if epoch == STAND_IN)
        self._withheld |= stand_ins
        if len(join.held) != len(state.versions):
            return stand_ins
        # What is accepted counts as recovered: its lineage is the store's.
        settled = max(held.settled for held in join.held)
        if not self._accepted and state.lineage.learn_settled(settled, emptied=self._rebuilding):
            self._drop_other_lineages()
        if self.is_other_lineage(join):
            return stand_ins
        newer = {
            fragment: held
            for fragment, held in enumerate(join.held)
            if held.version > state.versions[fragment] and not self._went_on_without(fragment, held)
        }
        if newer:
            self._held[join.connection] = {p: held for p, held in newer.items() if self._extends(p, held)}
            self._withheld |= newer.keys()
            self._announce_loss(f"{join.region}-{join.ordinal} holds newer versions, of fragments: {len(newer)}")
        return stand_ins | newer.keys()

    def is_other_lineage(self, join: ev.Join) -> bool:
        """Whether a learner's work is of another lineage than the store's."""
        return any(self._state.lineage.is_unknown(held.settled) for held in join.held)

    def _went_on_without(self, fragment: int, held: Held) -> bool:
        """Whether the store knows that it went on without this version. Where it does not know, a learner that
        holds the version is told nothing older: others may hold versions above it, and need its work."""
        lineage = self._state.lineage.epochs
        later = (versions for epoch, versions in self._state.epochs if epoch > held.epoch and epoch in lineage)
        return any(versions[fragment] < held.version for versions in later)

    def _extends(self, fragment: int, held: Held) -> bool:
        """Whether a held version continues this store's lineage: not older than the store's newest, made before
        this epoch, and its learner knew of every epoch that has settled since."""
        settled = self._state.lineage.newest_settled
        oldest = max(self._made[fragment], settled)
        return oldest <= held.epoch < self._state.epoch and settled in (held.settled, held.epoch)

    def _drop_other_lineages(self) -> None:
        """A settled epoch was learned that the store had forgotten: keep only what extends that lineage."""
        for versions in self._held.values():
            for fragment, held in list(versions.items()):
                if not self._extends(fragment, held):
                    del versions[fragment]
        self._requests = {p: r for p, r in self._requests.items() if p in self._held.get(r.connection, {})}

    def forget_connection(self, connection: int) -> None:
        """The connection is closed: it will not answer any more."""
        self._held.pop(connection, None)
        self._origins.pop(connection, None)
        self._requests = {p: request for p, request in self._requests.items() if request.connection != connection}

    # ------------------------------------------------------------- requests

    def check_upload(self, connection: int, fragment: int, epoch: int, version: int, rows: Receipt) -> str:
        """Whether this version may come now, before its bytes are read: empty, or why not."""
        request = self._requests.get(fragment)
        if request is None or (request.connection, request.epoch, request.version) != (connection, epoch, version):
            return f"this process was not asked for version {version} of fragment {fragment}"
        return validate_receipt(self._state, fragment, version, rows)

    def mark_failed(self, connection: int, fragment: int, now: float, not_believed: str = "") -> None:
        """The learner cannot give what it was asked for: the next holder is asked, in a rebuild this one too, unless it
        is ``not_believed``."""
        request = self._requests.get(fragment)
        if request is None or request.connection != connection:
            return
        del self._requests[fragment]
        self.disbelieve(connection, not_believed)
        if self._rebuilding and not not_believed:
            self._retry_at[connection, fragment] = now + RETRY_SECONDS
        else:
            self._held.get(connection, {}).pop(fragment, None)

    def disbelieve(self, connection: int, why: str) -> None:
        """Note, once, why what the learner gave back is not believed; empty: nothing speaks against it."""
        members = self._state.members
        slot, standby = members.by_connection(connection), members.standby.get(connection)
        process = slot.holder.process if slot is not None else standby.process if standby is not None else ""
        if why and process not in self._disbelieved:
            self._disbelieved.add(process)
            self._origins.pop(connection, None)
            who = slot.learner if slot is not None else "a learner that stands by"
            message = f"what {who} gives back of the lost store is not believed: {why}"
            self._actions.record_event(EventKind.LOST_DATA, slot, message)

    def mark_advanced(self, connection: int, fragment: int, whole: bool, now: float) -> None:
        """Bytes of an answer have come. ``whole``: all of them, and they are being decoded."""
        request = self._requests.get(fragment)
        if request is not None and request.connection == connection:
            idle_until = max(request.deadline, now + ANSWER_SECONDS) if whole else now + ANSWER_SECONDS
            self._requests[fragment] = replace(request, idle_until=idle_until)

    def mark_accepted(self, fragment: int) -> None:
        """The version that was asked for is here, and its record is being made durable. It is not given up any more."""
        self._requests.pop(fragment, None)
        self._accepted.add(fragment)

    def mark_stored(self, fragment: int) -> None:
        """A record with the version is durable."""
        self._requests.pop(fragment, None)
        self._accepted.discard(fragment)
        self._recovered.add(fragment)
        self._state.lineage.mark_recovered(self._state.epoch)

    def advance(self, now: float) -> None:
        """Request what is missing; restart when all came, or go on without it when nobody has it."""
        if self.is_rebuilding:
            self._skip_lease_numbers()  # the first learner that says how large the data is may join after the others
        if not self.is_pending or self._restarting or not self._all_present(now):
            return
        if not self._state.initialised:
            self._say_who_holds_the_model()
            return
        for request in list(self._requests.values()):
            overtaken = now >= request.deadline and self._find_free_holders(request.fragment, now)
            if overtaken or now >= min(request.idle_until, request.last_deadline):
                self.mark_failed(request.connection, request.fragment, now)
        for fragment in range(len(self._made)):
            if fragment not in self._recovered | self._accepted and fragment not in self._requests:
                self._request(fragment, now)
        if self._accepted or self._requests or any(held.keys() - self._recovered for held in self._held.values()):
            return
        if self._recovered:
            self._restarting = True
            message = f"fragments taken from learners: {len(self._recovered)}"
            self._actions.add(ev.RestartFromStore(message, 0))
        elif self._rebuilding:
            self._say_what_is_missing()
        else:
            self._give_up()

    def _all_present(self, now: float) -> bool:
        """Whether every learner that may hold something is connected or was given up. In a rebuild the store
        does not know its learners: all places are waited for, for a while."""
        state = self._state
        if any(slot.occupied and slot.holder.connection is None for slot in state.members.slots):
            return False
        present = sum(slot.occupied for slot in state.members.slots)
        if state.phase is JobPhase.WAITING and present < state.config.rules.quorum:
            return False
        if not self._rebuilding or present >= len(state.members.current):
            return True
        if self._rebuild_until is None:
            self._rebuild_until = now + state.config.rebuild_seconds
        return now >= self._rebuild_until

    def _find_free_holders(self, fragment: int, now: float) -> list[int]:
        """The connections of those that hold the newest version there is of a fragment and are asked for nothing."""
        holders = {
            connection: (held[fragment].version, held[fragment].epoch, held[fragment].settled)
            for connection, held in self._held.items()
            if fragment in held and self._retry_at.get((connection, fragment), now) <= now
        }
        newest = max(holders.values(), default=None)
        busy = {request.connection for request in self._requests.values()}
        return [connection for connection, held in holders.items() if held == newest and connection not in busy]

    def _request(self, fragment: int, now: float) -> None:
        free = self._find_free_holders(fragment, now)
        if not free:
            return
        connection = min(free)
        version, epoch = self._held[connection][fragment].version, self._held[connection][fragment].epoch
        patience = ANSWER_SECONDS + self._state.fragment_elements[fragment] / SLOWEST
        request = VersionRequest(
            connection,
            fragment,
            epoch,
            version,
            deadline=now + patience,
            last_deadline=now + ALONE * patience,
            idle_until=now + ANSWER_SECONDS,
        )
        self._requests[fragment] = request
        self._actions.add(ev.RequestVersion(connection, fragment, epoch, version))

    def _say_who_holds_the_model(self) -> None:
        """An empty store is rebuilt from learners only. Here those that held versions have gone, or only an evaluator
        has told of merged ones."""
        if not self._origins:
            holds = (
                "gives back a model that this control key proves" if self._disbelieved else "holds the model any more"
            )
            self._say_what_to_do(
                f"the store is empty, and no learner here {holds}. The syncer waits for one that does. "
                "You can give it its store back (spec.syncer.storage), or restart it to start the job anew"
            )
        holders = {connection for connection, origins in self._origins.items() if STAND_IN in origins}
        if holders and holders <= self._state.members.evaluators:
            self._say_what_to_do(
                "the store is empty, and only an evaluator holds merged versions, from which it cannot be rebuilt. "
                "The syncer waits for a learner that holds some. You can give the syncer its store back "
                "(spec.syncer.storage), or restart the evaluator and then the syncer to start the job anew"
            )

    def _say_what_is_missing(self) -> None:
        came_back = "has lost fragments" if any(self._state.versions) else "came back empty"
        self._say_what_to_do(
            f"the store {came_back}, and no learner here holds a merged version of fragments {self._stood_in_for()}. "
            "The syncer waits for one. You can give it its store back, or empty it and restart all learners to start "
            "the job anew"
        )

    def _stood_in_for(self) -> str:
        """The fragments of which the store has stand-ins, in words."""
        return ", ".join(str(p) for p, epoch in enumerate(self._made) if epoch == STAND_IN)

    def _say_what_to_do(self, message: str) -> None:
        if self._set_message(message):
            self._actions.record_event(EventKind.LOST_DATA, None, message)

    def _give_up(self) -> None:
        """No learner has anything: the job goes on from what the store has, for good."""
        state = self._state
        state.lineage.mark_settled(state.epoch)
        state.phase_message = "no learner has what the store lost"
        self._actions.record_event(
            EventKind.LOST_DATA, None, f"{state.phase_message}: continuing from versions {state.versions}"
        )
        self._actions.add(ev.Persist(), ev.SetPhase(state.phase, state.phase_message))
        self._actions.add(*(state.announcement(fragment) for fragment in sorted(self._withheld)))
