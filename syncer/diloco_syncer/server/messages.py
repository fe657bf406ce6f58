"""Between a session's messages and the core: a learner's message becomes an event, an action becomes a message.

A message has been measured and parsed when it comes here. It is checked here, by ``diloco_protocol/wire/convert.py``
and by what is said at each kind: one that makes no sense raises ``WireError``, and nothing of it is believed.
Nothing here knows of sessions or waits for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol.spec.job import DiLoCoJob, SyncerSettings
from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Announcement, Evaluation, Pull
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.global_model import Broadcast

_PHASES: dict[JobPhase, Any] = {name: sync_pb2.PhaseName.Value(f"PHASE_{name.name}") for name in JobPhase}

Addressed = ev.RequestPeerState | ev.OfferPeerState | ev.Promote | ev.Pull | ev.GrantLease | ev.RequestVersion


class OtherJob(WireError):
    """A Join, well-formed or not, for another job."""


# ------------------------------------------------------------------ up


def read_join(message: sync_pb2.LearnerMessage, job: str, connection: int) -> ev.Join:
    """The Join that opens a session of ``job``. Raises ``WireError``, for another job ``OtherJob``."""
    if message.WhichOneof("kind") != "join":
        raise WireError("the first message must be Join")
    said = message.join
    limits.check_format(said.format)
    if said.job != job:
        raise OtherJob(f"job {said.job[:80]!r}: this syncer serves {job!r}")
    if said.role not in (sync_pb2.ROLE_LEARNER, sync_pb2.ROLE_EVALUATOR):
        raise WireError("role: expected learner or evaluator")
    evaluator = said.role == sync_pb2.ROLE_EVALUATOR
    join = convert.from_wire(ev.Join, said, connection=connection, evaluator=evaluator)
    if odd := next((held for held in join.held if held.settled > held.epoch), None):
        raise WireError(f"held: epoch {odd.settled} cannot have settled before epoch {odd.epoch}")
    return join


def read_event(message: sync_pb2.LearnerMessage, connection: int) -> ev.Event:
    """The event that a message is which says one thing to the core. Raises ``WireError``."""
    match message.WhichOneof("kind"):
        case "evaluation":
            return ev.Evaluated(connection, convert.from_wire(Evaluation, message.evaluation))
        case "evaluation_progress":
            share = limits.check_share(message.evaluation_progress.share, "share")
            return ev.EvaluationAdvanced(connection, share)
        case "drain_request":
            return ev.DrainRequested(connection)
        case "drained":
            return ev.Drained(connection)
        case "peer_state_wanted":
            return ev.PeerStateRequested(connection, message.peer_state_wanted.patient)
        case "peer_state_unavailable":
            return ev.PeerStateFailed(connection, message.peer_state_unavailable.transfer)
        case "base_unavailable":
            return ev.LostVersionFailed(connection, message.base_unavailable.fragment)
        case "join":
            raise WireError("Join is sent once, as the first message")
        case _:
            raise WireError("a message of an unknown kind: run the same release on both sides")


# ------------------------------------------------------------------ down


def phase_to(phase: JobPhase, message: str) -> sync_pb2.Phase:
    return sync_pb2.Phase(name=_PHASES[phase], message=message[: limits.MAX_TEXT])


def refusal(reason: str, message: str, fatal: bool, tensors: bytes = b"") -> sync_pb2.SyncerMessage:
    said = sync_pb2.Refusal(reason=reason, message=message[: limits.MAX_TEXT], fatal=fatal, tensors=tensors)
    return sync_pb2.SyncerMessage(refusal=said)


def addressed_message(action: Addressed, epoch: int) -> sync_pb2.SyncerMessage:
    """The message of an action that is one message for one learner."""
    told: dict[str, Any]
    match action:
        case ev.Promote():
            told = {"promotion": sync_pb2.Promotion(seat=convert.to_wire(action.seat))}
        case ev.GrantLease():
            told = {"lease": convert.to_wire(action.lease)}
        case ev.Pull():
            told = {"pull": convert.to_wire(Pull(action.round, action.fragment, epoch, action.version))}
        case ev.RequestVersion():
            version = {"fragment": action.fragment, "epoch": action.epoch, "version": action.version}
            told = {"base_request": version}
        case ev.OfferPeerState():
            told = {"peer_state_ready": {"transfer": action.transfer}}
        case ev.RequestPeerState():
            told = {"peer_state_request": {"transfer": action.transfer}}
    return sync_pb2.SyncerMessage(**told)


@dataclass(frozen=True, slots=True)
class NewsForLearners:
    """What learners are told of the job: its settings, its versions, and how far it is."""

    job: DiLoCoJob
    core: Core

    def announcement(
        self, broadcast: Broadcast, merged: ev.MergedPush, job_tokens: int, progress: float
    ) -> sync_pb2.Announcement:
        """A version as one learner is told of it, whose newest merged push is ``merged``. ``progress``: how much of
        the job's stop is reached, 0 to 1."""
        told = Announcement(
            broadcast.fragment,
            self.core.epoch,
            broadcast.version,
            broadcast.full_payload,
            merged_sequence=merged.sequence,
            merged_version=merged.version,
            delta=broadcast.delta_payload,
            job_tokens=job_tokens,
            settled=self.core.newest_settled_epoch,
            progress=progress,
        )
        return convert.to_wire(told)

    def welcome(
        self, admit: ev.Admit, broadcasts: Sequence[Broadcast], problem: str, optimizer_bytes: int, progress: float
    ) -> sync_pb2.Welcome:
        """The answer to a Join. ``broadcasts``: the versions in force when the core decided; ``problem``: of the
        store, empty: none; ``optimizer_bytes``: of the stored optimizer state."""
        tokens = self.core.trained_tokens
        merged = admit.merged or (ev.MergedPush(),) * len(broadcasts)
        welcome = sync_pb2.Welcome(
            epoch=self.core.epoch,
            standby=admit.seat is None and not admit.observer,
            observer=admit.observer,
            settings=SyncerSettings.of(self.job.spec).model_dump_json(),
            phase=phase_to(admit.phase, problem or admit.message),
            fragments=[
                self.announcement(broadcast, push, tokens, progress)
                for broadcast, push in zip(broadcasts, merged, strict=True)
                if broadcast.fragment not in admit.withheld
            ],
            initialise=admit.initialise,
            optimizer_bytes=optimizer_bytes,
        )
        if admit.seat is not None:
            welcome.seat.CopyFrom(convert.to_wire(admit.seat))
        return welcome
