"""What one session moves in bulk beside its control stream: versions down, pushes up, optimizer states both ways.

Theory of operation
-------------------
A ``Transfers`` lives as long as one session with the syncer. What outlives sessions it shares with its
predecessors (``TransferContext``): the inbox, the fragment cache, error feedback.

Everything here runs in the client's event loop. What takes long is a task of its own (``spawn``), and
encoding, decoding and checksums run in executor threads (``bulk_channels``).

*Down.* Each announcement is passed to the training thread at once, and as ``Downloaded``
when its bytes are here. One download runs per fragment at a time, of the newest announcement; a version
that was overtaken meanwhile is skipped. Example: versions 4, 5 and 6 are announced while 3 is being
downloaded; then 6 is downloaded next, as a whole, because a delta applies to the version before only.
``_DOWNLOADS_AT_ONCE`` fragments are downloaded at a time, those first that wait longest. So a newcomer has some of its
model soon, whatever its link, and a merge's broadcast is not held up by a share of everything else.

*Up.* Pushes are encoded and sent in order, two at a time. The syncer's answer is passed on as
``PushAnswered``. If the session ends first, at either end, the push's fate is open (``accepted`` None): its work stays
above the base, and a later broadcast names the push if it was merged.

*Shards.* The bytes of a fragment may be those of another process, a shard of the syncer (``routes``). Each shard has
a share of the transfers at a time, so those with one that is away hold up no others.

A transfer that failed for good ends the session where the syncer may have another certificate by now, which only a
new connection finds out. So do a version that does not arrive and a push that gets no answer, in several tries: the
next session has new connections, and the syncer asks anew. But where it is a shard that does not answer, the session
goes on: the syncer asks for the push again, and the version is asked for until it comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.format_units import download_text
from diloco_protocol.vocabulary import MAX_FRAGMENTS, PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk, convert, limits, sync_pb2
from diloco_protocol.wire.records import Announcement, Payload, PushPlan, Shard, StepReport
from diloco_worker.device import return_free_memory
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.bulk_channels import BulkChannels, pause
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import CachedVersion, FragmentCache
from diloco_worker.net.inbox import Downloaded, FrozenDownloaded, Inbox, PushAnswered, StateDownloaded
from diloco_worker.net.routes import Route
from diloco_worker.net.session import Outbox
from diloco_worker.net.tensor_file import map_new_file
from diloco_worker.settings import ConfigurationError, DivergedError

log = logging.getLogger(__name__)

_DOWNLOADS_AT_ONCE = 4  # fragments: one is decoded while others come, and round trips overlap
_TELL_SECONDS = 10.0  # between two lines about a newcomer's download
_PUSHES_AT_ONCE = 2  # one is encoded while another is uploaded
_MOST_QUEUED_PUSHES = 2 * MAX_FRAGMENTS
_MOST_DIGEST_BYTES = 1024
RETURN_MEMORY_SECONDS = 15.0  # between two returns, of some 30 ms beside the training
_STATE_TRIES = 4
_MOST_STATES = 8  # begun, and not answered; far fewer are asked for at a time
_STATE_SECONDS = 60.0  # for which one whose session broke is kept, in a file; the syncer waits less
_VERSION_TRIES = 4  # of one version in a session, newer ones included; the next one has new connections
_INITIAL_TRIES = 4  # of version 0 in one session, beside those of each part
_INITIAL_PAUSE = 0.25


@dataclass(frozen=True, slots=True)
class Push:
    """One push: Δ = ``base`` - ``theta``, float32[elements] each, and the report that goes with it."""

    plan: PushPlan
    base: Vector
    theta: Vector
    report: StepReport

    def answered(self, accepted: bool | None, reason: str, message: str) -> PushAnswered:
        """The answer to this push. ``accepted`` None: none came."""
        return PushAnswered(self.plan.fragment, self.plan.sequence, accepted, reason, message=message)


@dataclass(slots=True)
class StateUpload:
    """An inner optimizer state on its way to the syncer, made on ``versions``. ``data`` None: it is given up.
    ``expiry``: gives it up, since its session ended."""

    versions: list[sync_pb2.Held]
    data: Bytes | None
    sent: bulk.SentParts = field(default_factory=bulk.SentParts)
    expiry: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What all sessions of one worker process share.

    ``to_vector`` makes the vector that the training thread gets, of decoded values float32[elements].
    ``eager``: every announced version is downloaded; otherwise the first of each fragment, and later
    ones when ``fetch_announced`` asks for them. ``pushes_again``: what a session did not bring to the syncer is pushed
    again in the next one, and by nobody in the same one (deterministic mode). ``states``: optimizer states that have
    been begun and not answered, by the syncer's epoch and the transfer.
    """

    layout: Layout
    inbox: Inbox
    outbox: Outbox
    cache: FragmentCache
    feedback: ErrorFeedback
    to_vector: Callable[[Floats], Vector] = Vector.from_array
    eager: bool = True
    pushes_again: bool = False
    states: dict[tuple[int, int], StateUpload] = field(default_factory=dict)


@dataclass
class Transfers:
    """The bulk transfers of one session. ``encoding`` is that of pushes; the client sets it when the syncer
    names another. ``spawn(work, *arguments)`` runs a coroutine function as a task, until it ends or the session does.
    ``end_session(reason)`` makes the client connect anew. ``pinned_server``: the channels trust one server certificate
    only."""

    context: TransferContext
    channels: BulkChannels
    encoding: str
    spawn: Callable[..., None]
    end_session: Callable[[str], None]
    pinned_server: bool = False

    def __post_init__(self) -> None:
        self._layout = self.context.layout
        self._inbox = self.context.inbox
        self._cache = self.context.cache
        self._announced: dict[int, Announcement] = {}  # the newest, per fragment
        self._fetching: set[int] = set()
        self._in_vain = Counter[int]()  # per fragment, tries of its version in succession; not those of an absent shard
        self._download_turns: dict[Route, asyncio.Semaphore] = {}
        self._tell_at = 0.0
        self._pushes: list[Push] = []
        self._pushing = Counter[Route]()
        self._return_memory_at = time.monotonic() + RETURN_MEMORY_SECONDS

    def set_shards(self, shards: Sequence[Shard]) -> None:
        """Exchange the bytes of fragments with these from now on, and of others with the syncer."""
        self.channels.routes.set_shards(shards)
        self._start_pushes()

    def close(self) -> None:
        """Answer the pushes that are queued, and keep states that were begun. The spawned tasks must have ended."""
        for push in self._pushes:
            self._inbox.put(push.answered(None, "", "the connection broke"))
        self._pushes.clear()
        for upload in self.context.states.values():
            if upload.expiry is None:
                upload.expiry = asyncio.get_running_loop().call_later(_STATE_SECONDS, setattr, upload, "data", None)

    # ------------------------------------------------------- versions, down

    def on_announcement(self, announcement: Announcement) -> None:
        """Pass an announcement of one of the layout's fragments on, and download it. Raises WireError for one
        that cannot be of this layout."""
        fragment = announcement.fragment
        self._check_announcement(announcement)
        self._announced[fragment] = announcement
        self._inbox.put(announcement)
        if self.context.eager or self._cache.get(fragment) is None:
            self._fetch(fragment)

    def _check_announcement(self, announcement: Announcement) -> None:
        fragment = announcement.fragment
        elements = self._layout.elements(fragment)
        for payload in filter(None, (announcement.full, announcement.delta)):
            if payload.encoding not in codec.ENCODINGS:
                raise limits.WireError(f"fragment {fragment} is announced in encoding {payload.encoding!r}")
            if payload.bytes != codec.encoded_bytes(payload.encoding, elements):
                raise limits.WireError(
                    f"fragment {fragment} is announced with {payload.bytes} bytes of "
                    f"{payload.encoding}, and it has {elements} elements"
                )
        if announcement.merged_version > announcement.version:
            raise limits.WireError(f"fragment {fragment}: a push merged after version {announcement.version} is named")

    async def fetch_announced(self) -> None:
        """Download the newest version of every fragment that is not here yet."""
        for fragment, announcement in self._announced.items():
            cached = self._cache.get(fragment)
            wanted = (announcement.epoch, announcement.version)
            if cached is None or (cached.announcement.epoch, cached.announcement.version) != wanted:
                self._fetch(fragment)

    def _fetch(self, fragment: int) -> None:
        if fragment not in self._fetching:
            self._fetching.add(fragment)
            self.spawn(self._fetch_fragment, fragment)

    async def _fetch_fragment(self, fragment: int) -> None:
        """Download the newest announced version, and again while a newer one was announced."""
        attempt = 0
        try:
            while True:
                async with self._turns(fragment):
                    announcement = self._announced[fragment]
                    version = await self._obtain_version(announcement)
                if version is None:
                    attempt += 1
                    if self._in_vain[fragment] >= _VERSION_TRIES:
                        self.end_session(f"fragment {fragment} does not arrive in {attempt} tries")
                    await asyncio.sleep(pause(attempt))
                    continue
                attempt = self._in_vain[fragment] = 0
                vector = await self.channels.run(self.context.to_vector, version.values)  # it may pin its memory
                self._cache.put(replace(version, values=vector.array))  # and is then all that is kept
                self._tell_progress()
                self._inbox.put(Downloaded(announcement, vector))
                del version, vector
                if time.monotonic() >= self._return_memory_at:
                    self._return_memory_at = time.monotonic() + RETURN_MEMORY_SECONDS
                    await self.channels.run(return_free_memory)
                if self._announced[fragment] is announcement or not self.context.eager:
                    break
        finally:
            self._fetching.discard(fragment)

    def _turns(self, fragment: int) -> asyncio.Semaphore:
        route = self.channels.routes.find(fragment)
        return self._download_turns.setdefault(route, asyncio.Semaphore(route.share(_DOWNLOADS_AT_ONCE)))

    @property
    def missing_fragments(self) -> int:
        """How many fragments of the model were announced, and are not here in any version."""
        return sum(self._cache.get(fragment) is None for fragment in self._announced)

    def _tell_progress(self) -> None:
        """Say once in a while how much of the model a newcomer has."""
        now, here = time.monotonic(), len(self._layout) - self.missing_fragments
        if self.missing_fragments and now >= self._tell_at:
            self._tell_at = now + _TELL_SECONDS
            rate = self.channels.arriving.rate(asyncio.get_running_loop().time())
            log.info("%s of the model downloaded", download_text(here, len(self._layout), rate))

    async def _obtain_version(self, announcement: Announcement) -> CachedVersion | None:
        """The version, from the cache or downloaded; None, and a line in the log: it did not arrive."""
        cached = self._cache.get(announcement.fragment)
        if (
            cached is not None
            and cached.announcement.version == announcement.version
            and cached.announcement.full == announcement.full
        ):
            return replace(cached, announcement=announcement)  # announced again after a reconnect: the same bytes
        try:
            version = await self._download_version(announcement, cached)
            if version is not None:
                return version
            why = "the syncer has it no more"
            self._in_vain[announcement.fragment] += 1
        except (bulk.TransferError, limits.WireError) as error:
            why = str(error)
            if not self._is_shard_away(announcement.fragment, error):
                self._in_vain[announcement.fragment] += 1
                self._reconnect_if_pinned(error)
        log.warning("fragment %d version %d did not arrive: %s", announcement.fragment, announcement.version, why)
        return None

    async def _download_version(self, announcement: Announcement, cached: CachedVersion | None) -> CachedVersion | None:
        """The announced version, as a delta to ``cached`` where that is the one before, otherwise in whole.
        None: the syncer has it no more."""
        full = announcement.full
        elements = self._layout.elements(announcement.fragment)
        if (
            announcement.delta is not None
            and cached is not None
            and (cached.announcement.epoch, cached.announcement.version)
            == (announcement.epoch, announcement.version - 1)
        ):
            found = await self._download(sync_pb2.DownloadRequest.DELTA, announcement, announcement.delta)
            if found is not None:
                update = await self.channels.run(codec.decode, found[1], announcement.delta.encoding, elements)
                values: Floats = cached.values + update
                if full.encoding != "float32" or await self.channels.run(bulk.checksum, values) == full.checksum:
                    return CachedVersion(announcement, values, found[0])
        found = await self._download(sync_pb2.DownloadRequest.FULL, announcement, full)
        if found is None:
            return None
        return CachedVersion(
            announcement, await self.channels.run(codec.decode, found[1], full.encoding, elements), found[0]
        )

    async def _download(self, what: Any, announcement: Announcement, payload: Payload) -> tuple[bytes, Bytes] | None:
        """Receipt and bytes, uint8; None: the syncer has it no more."""
        fragment, version = announcement.fragment, announcement.version
        asked = {"what": what, "fragment": fragment, "epoch": announcement.epoch, "version": version}
        found = await self.channels.download(size=payload.bytes, catching_up=self._cache.get(fragment) is None, **asked)
        if found is None:
            return None
        header, data = found
        if await self.channels.run(bulk.checksum, data) != payload.checksum:
            raise limits.WireError(
                f"fragment {fragment} version {version}: its bytes are not those that were announced"
            )
        return header.receipt, data

    def _is_shard_away(self, fragment: int, error: Exception) -> bool:
        """Whether a transfer of the fragment failed for no more than that its shard did not answer."""
        return isinstance(error, bulk.TransferError) and error.retry and self.channels.routes.has_shard(fragment)

    def _reconnect_if_pinned(self, error: Exception) -> None:
        """End the session if a transfer failed for good and the syncer may have another certificate by now."""
        if self.pinned_server and isinstance(error, bulk.TransferError):
            self.end_session(f"bulk transfers fail: {error}")

    # ------------------------------------------------------- versions, up

    async def return_version(self, request: sync_pb2.BaseRequest) -> None:
        """Send a version that the syncer's store lost, or say that it is not to be had here."""
        fragment, cached = request.fragment, self._cache.get(request.fragment)
        why = "this process no longer has it"
        if cached is not None and cached.can_return(request.epoch, request.version):
            base = sync_pb2.Base(
                fragment=fragment,
                epoch=request.epoch,
                version=request.version,
                encoding=cached.announcement.full.encoding,
                receipt=cached.receipt,
            )
            try:
                reply = await self.channels.upload(await self.channels.run(cached.encode), base=base)
                if reply.accepted:
                    log.info("fragment %d: the syncer took version %d back", fragment, request.version)
                    return
                why = f"refused ({reply.reason}): {reply.message}"
            except bulk.TransferError as error:
                why = str(error)
        log.warning("fragment %d version %d is not given back: %s", fragment, request.version, why)
        unavailable = sync_pb2.BaseUnavailable(fragment=fragment)
        self.context.outbox.put(f"no-base-{fragment}", sync_pb2.LearnerMessage(base_unavailable=unavailable))

    async def upload_initial(self, vectors: Sequence[Vector], frozen: Bytes | bytes, digest: str = "") -> None:
        """Upload version 0; ``digest``: of the frozen parameters. After a few tries the session is ended, so that the
        syncer asks another learner, or this one again. Raises ConfigurationError for a start that is not finite."""
        for fragment, vector in enumerate(vectors):
            if not (await self.channels.run(lambda v=vector: codec.norm_and_finite(v.array)))[1]:
                raise ConfigurationError(
                    f"the model's start has values that are not finite (fragment {fragment}): version 0 "
                    "would be useless; check how the model is built, or the weights that it starts from"
                )
        for attempt in range(_INITIAL_TRIES):
            try:
                await self._upload_initial_parts(vectors, frozen, digest)
                return
            except bulk.TransferError as error:
                log.warning("version 0 did not come through: %s", error)
            await asyncio.sleep(pause(attempt, first=_INITIAL_PAUSE))
            if len(self._announced) == len(self._layout):
                return  # it exists: only the last answer was lost
        self.end_session(f"version 0 did not come through in {_INITIAL_TRIES} tries")

    async def _upload_initial_parts(self, vectors: Sequence[Vector], frozen: Bytes | bytes, digest: str) -> None:
        """Raises bulk.TransferError if a part was refused or did not come through."""
        part = sync_pb2.Initial
        payloads: list[tuple[sync_pb2.Initial, Any]] = [
            (part(part=part.LAYOUT), self._layout.to_json().encode("ascii")),
            *(self._initial_fragment(p, vector) for p, vector in enumerate(vectors)),
            *([(part(part=part.FROZEN, digest=digest), frozen)] if len(frozen) else []),
            (part(part=part.DONE), b""),
        ]
        for what, payload in payloads:
            if isinstance(payload, Vector):
                payload = await self.channels.run(lambda vector=payload: vector.array)
            if what.part == part.FRAGMENT:
                what.digest = await self.channels.run(bulk.checksum_text, payload)
            reply = await self.channels.upload(payload, initial=what)
            if not reply.accepted:
                raise bulk.TransferError(f"version 0 was refused ({reply.reason}): {reply.message}", retry=True)

    def _initial_fragment(self, fragment: int, vector: Vector) -> tuple[sync_pb2.Initial, Any]:
        """A fragment of version 0: the version that this process holds, with its receipt, else its own ``vector``."""
        cached = self._cache.get(fragment)
        what = sync_pb2.Initial(part=sync_pb2.Initial.FRAGMENT, fragment=fragment)
        if cached is None:
            return what, vector
        what.receipt = cached.receipt
        return what, cached.values

    # ------------------------------------------------------- pushes

    def push(self, push: Push) -> None:
        """Encode and send a push after those that are queued; ``PushAnswered`` follows in the inbox."""
        if len(self._pushes) >= _MOST_QUEUED_PUSHES:
            self._inbox.put(push.answered(None, "", "too many pushes wait to be sent"))
            return
        self.context.feedback.expect_push(push.plan.fragment, push.plan.sequence)
        self._pushes.append(push)
        self._start_pushes()

    def _start_pushes(self) -> None:
        for push in self._pushes:
            route = self.channels.routes.find(push.plan.fragment)
            if self._pushing[route] < route.share(_PUSHES_AT_ONCE):
                self._pushing[route] += 1
                self.spawn(self._send_pushes, route)

    async def _send_pushes(self, route: Route) -> None:
        try:
            while (push := self._take_push(route)) is not None:
                await self._send_push(push)
        finally:
            self._pushing[route] -= 1

    def _take_push(self, route: Route) -> Push | None:
        """The next push that goes there."""
        for place, push in enumerate(self._pushes):
            if self.channels.routes.find(push.plan.fragment) is route:
                return self._pushes.pop(place)
        return None

    async def _send_push(self, push: Push) -> None:
        plan = push.plan
        try:
            encoding = self.encoding
            encoded = await self.channels.run(encode_push, push, encoding, self.context.feedback)
            report = convert.to_wire(push.report)
            message = convert.to_wire(plan, encoding=encoding, layout_digest=self._layout.digest, report=report)
            reply = await self.channels.upload(encoded, push=message)
        except bulk.TransferError as error:
            log.warning("push %d of fragment %d got no answer: %s", plan.sequence, plan.fragment, error)
            self._inbox.put(push.answered(None, "", "no answer came"))
            is_asked_again = self._is_shard_away(plan.fragment, error) and not self.context.pushes_again
            if not is_asked_again and (error.retry or self.pinned_server):
                self.end_session(f"pushes do not come through: {error}")
            return
        except asyncio.CancelledError:
            self._inbox.put(push.answered(None, "", "the connection broke"))
            raise
        # `repeated`: the id came through before, so an earlier answer was lost. `not-joined`: the session is over, and
        # that says nothing of the push. An earlier try may have come through, and deterministic mode sends it again.
        accepted: bool | None = reply.accepted or reply.reason == PushRefusal.REPEATED
        if reply.reason == TransferRefusal.NOT_JOINED:
            accepted = None
        if not accepted:
            level = logging.DEBUG if reply.reason == PushRefusal.OTHER_ROUND else logging.INFO  # late: it happens
            text = "push %d of fragment %d was refused (%s): %s"
            log.log(level, text, plan.sequence, plan.fragment, reply.reason, reply.message)
        self._inbox.put(push.answered(accepted, reply.reason, reply.message))

    # ------------------------------------------------------- states

    async def fetch_frozen(self, limit: int, own_digest: Callable[[], str]) -> None:
        """Download the frozen parameters, at most ``limit`` bytes, if their digest is not ``own_digest()``, which is
        called in another thread; ``FrozenDownloaded`` follows in the inbox."""
        digest = await self._download_state(sync_pb2.DownloadRequest.FROZEN_DIGEST, _MOST_DIGEST_BYTES)
        if digest is not None and digest[1].tobytes().decode("ascii", "replace") == await self.channels.run(own_digest):
            self._inbox.put(FrozenDownloaded(None, same=True))
            return
        found = await self._download_state(sync_pb2.DownloadRequest.FROZEN, limit)
        self._inbox.put(FrozenDownloaded(found[1] if found else None))

    async def fetch_optimizer(self, limit: int, epoch: int) -> None:
        """Download the job checkpoint's inner optimizer state; ``StateDownloaded`` follows in the inbox."""
        self._inbox.put(await self.download_state(sync_pb2.DownloadRequest.OPTIMIZER, limit, 0, epoch))

    async def download_state(self, what: Any, limit: int, transfer: int, epoch: int) -> StateDownloaded:
        """Download an inner optimizer's state (``what``: OPTIMIZER, the job checkpoint's, or PEER_STATE), at most
        ``limit`` bytes. ``epoch``: in which it was offered; what broke in another session goes on in this one."""
        found = await self._download_state(what, limit, transfer, epoch)
        peer = what == sync_pb2.DownloadRequest.PEER_STATE
        if found is None:
            return StateDownloaded(peer, None)
        versions = tuple((held.epoch, held.version) for held in found[0].versions)
        return StateDownloaded(peer, found[1], versions)

    async def _download_state(
        self, what: Any, limit: int, transfer: int = 0, epoch: int = 0
    ) -> tuple[sync_pb2.DownloadHeader, Bytes] | None:
        """Header and bytes (a mapped file) of FROZEN (or its digest), PEER_STATE or OPTIMIZER; None: none came."""
        name = sync_pb2.DownloadRequest.What.Name(what)
        for attempt in range(_STATE_TRIES):
            try:
                return await self.channels.download(
                    limit=limit, allocate=map_new_file, what=what, transfer=transfer, epoch=epoch
                )
            except (limits.WireError, OSError) as error:
                log.warning("%s was not taken: %s", name, error)
                return None
            except bulk.TransferError as error:
                log.warning("%s did not arrive: %s", name, error)
                if not error.retry:
                    return None
                await asyncio.sleep(pause(attempt))
        return None

    async def send_state(
        self, transfer: int, encode: Callable[[], Bytes], versions: Iterable[tuple[int, int]], epoch: int
    ) -> None:
        """Upload this learner's inner optimizer state, made on ``versions`` ((epoch, version) per fragment). One that
        ``encode`` cannot serialise is declined: it is no reason to end this learner. ``epoch``: of the request."""
        try:
            data = await self.channels.run(encode)
        except Exception as error:
            self._decline_state(transfer, f"it cannot be serialised: {error}")
            return
        states = self.context.states
        if (epoch, transfer) in states:
            return  # it was asked for twice: parts of another state may not be joined with its own
        states[epoch, transfer] = StateUpload([sync_pb2.Held(epoch=e, version=v) for e, v in versions], data)
        while len(states) > _MOST_STATES:
            del states[next(iter(states))]
        await self.resume_state(transfer, epoch)

    async def resume_state(self, transfer: int, epoch: int) -> None:
        """Upload the rest of a state that was begun, or decline one that was given up; the next session may go on."""
        upload = self.context.states[epoch, transfer]
        if upload.data is None:
            self._decline_state(transfer, "too much time has passed since its upload broke")
            return
        if upload.expiry is not None:
            upload.expiry.cancel()
            upload.expiry = None
        state = sync_pb2.PeerState(transfer=transfer, versions=upload.versions)
        try:
            reply = await self.channels.upload(upload.data, kept=upload.sent, peer_state=state)
            if reply.reason == TransferRefusal.NOT_JOINED:
                return  # the session is over, which this side has yet to hear
            if not reply.accepted:
                self._decline_state(transfer, f"refused ({reply.reason}): {reply.message}")
        except bulk.TransferError as error:
            self._decline_state(transfer, str(error))
        self.context.states.pop((epoch, transfer), None)

    def _decline_state(self, transfer: int, why: str) -> None:
        log.warning("the optimizer's state is not given to a newcomer: %s", why)
        self.context.outbox.put(f"no-state-{transfer}", decline_state(transfer))


def decline_state(transfer: int) -> sync_pb2.LearnerMessage:
    """The answer that this learner has no inner optimizer state to give."""
    return sync_pb2.LearnerMessage(peer_state_unavailable=sync_pb2.PeerStateUnavailable(transfer=transfer))


def encode_push(push: Push, encoding: str, feedback: ErrorFeedback) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Δ = base - θ, with error feedback plus the residual, encoded: uint8. Raises DivergedError for one that is not
    finite: it would be refused, and no later broadcast would make the parameters finite again."""
    plan = push.plan
    delta: Floats = np.subtract(push.base.array, push.theta.array)
    if not codec.norm_and_finite(delta)[1]:
        raise DivergedError(f"fragment {plan.fragment} has values that are not finite at step {plan.last_step}")
    if not feedback.enabled:
        return codec.encode(delta, encoding)
    residual = feedback.residual(plan.fragment)
    if residual is None:
        residual = np.zeros_like(delta)
    encoded, dropped = codec.encode_with_feedback(delta, residual, encoding)
    feedback.record_dropped(plan.fragment, plan.sequence, dropped)
    return encoded
