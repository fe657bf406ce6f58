"""What a worker downloads and uploads in bulk, beside the session that tells of it.

Theory of operation
-------------------
All of it runs in the exchange's loop; what is long is a task (``spawn``), encoding and
decoding go to threads (``transfers``). Between ``begin`` and ``close`` there is a session, and
``transfers`` is its connections. What ends with them:

- announcements not fetched yet: the next session announces every fragment anew;
- queued pushes, and one that got no answer: their fate is open (``PushAnswered.accepted`` None).

What stays: the versions held, which a Join names, and the newest roll-back of each fragment.

Per fragment one download runs at a time, of the newest announcement; one that was overtaken
meanwhile is skipped. A version announced again, with the same bytes, is not downloaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_worker.core.adoption import Broadcast
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.fragment_cache import CachedVersion, FragmentCache
from diloco_worker.net.inbox import Announced, Downloaded, FrozenDownloaded, Inbox, PushAnswered, StateDownloaded
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import ErrorFeedback, Identity, Push, Transfers, pause
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)

_PUSHES_AT_ONCE = 2  # one is encoded while another is uploaded
_MOST_QUEUED_PUSHES = 2 * limits.MAX_FRAGMENTS
_BLOB_TRIES = 4
_INITIAL_TRIES = 4  # of version 0 in one session, beside those of each part
_INITIAL_PAUSE = 0.25

Spawn = Callable[..., None]
"""``spawn(work, *arguments)`` runs a coroutine function as a task, until it ends or the session does."""


class Deliveries:
    """Of one worker process. ``identity`` and ``encoding`` (of pushes) are the exchange's to set."""

    def __init__(
        self,
        layout: Layout,
        inbox: Inbox,
        outbox: Outbox,
        feedback: ErrorFeedback,
        identity: Identity,
        encoding: str,
        spawn: Spawn,
        pinned: Callable[[Floats], Vector],
        eager: bool,
    ) -> None:
        """``eager``: every announced version is downloaded; else only the first of each fragment, and what
        is asked for. ``pinned`` makes a vector of what was decoded."""
        self.identity = identity
        self.encoding = encoding
        self.feedback = feedback
        self.holdings = FragmentCache(len(layout))
        self.transfers: Transfers | None = None
        self.open = False  # pushes and version 0 may go out
        self._layout = layout
        self._inbox = inbox
        self._outbox = outbox
        self._spawn = spawn
        self._pinned = pinned
        self._eager = eager
        self._break_off: Callable[[str], None] = _nobody
        self._pinned_server = False
        self._news: dict[int, sync_pb2.Announcement] = {}  # newest announced, per fragment
        self._resets: dict[int, tuple[int, int]] = {}  # newest roll-back, per fragment
        self._fetching: set[int] = set()
        self._pushes: list[Push] = []
        self._pushing = 0

    def begin(self, transfers: Transfers, break_off: Callable[[str], None], pinned_server: bool) -> None:
        """A session is there. ``break_off(reason)`` ends it; ``pinned_server``: its channels believe one
        certificate only."""
        self.transfers = transfers
        self._break_off = break_off
        self._pinned_server = pinned_server
        self.open = True

    def close(self) -> None:
        """The session is over: nothing new goes out. ``end`` follows when the tasks have ended."""
        self.open = False
        self._break_off = _nobody

    def end(self) -> None:
        """The tasks that were spawned in the session have ended."""
        self.transfers = None
        for push in self._pushes:
            self._verdict(push, None, "", "the connection broke")
        self._pushes.clear()
        self._news.clear()
        self._fetching.clear()

    # ------------------------------------------------------- versions, down

    def announced(self, news: sync_pb2.Announcement) -> None:
        """Raises WireError for one that cannot be of this layout; ``news.fragment`` is of it."""
        elements = self._layout.elements(news.fragment)
        for payload, name in ((news.full, "full"), (news.delta, "delta")):
            if name == "delta" and not news.HasField("delta"):
                continue
            if payload.encoding not in codec.ENCODINGS:
                raise limits.WireError(f"fragment {news.fragment} is announced in encoding {payload.encoding!r}")
            if payload.bytes != codec.encoded_bytes(payload.encoding, elements):
                raise limits.WireError(
                    f"fragment {news.fragment} is announced with {payload.bytes} bytes of "
                    f"{payload.encoding}, and it has {elements} elements"
                )
        if news.merged_version > news.version:
            raise limits.WireError(f"fragment {news.fragment}: a push merged after version {news.version} is named")
        self._news[news.fragment] = news
        if news.reset:
            self._resets[news.fragment] = (news.epoch, news.version)
        self._inbox.put(Announced(self._broadcast(news), news.job_tokens))
        if self._eager or self.holdings.get(news.fragment) is None:
            self._fetch(news.fragment)

    def fetch_announced(self) -> None:
        """The newest version of every fragment that is not here yet."""
        for fragment, news in self._news.items():
            here = self.holdings.get(fragment)
            if here is None or (here.news.epoch, here.news.version) != (news.epoch, news.version):
                self._fetch(fragment)

    def _broadcast(self, news: sync_pb2.Announcement) -> Broadcast:
        full = news.full
        return Broadcast(
            fragment=news.fragment,
            epoch=news.epoch,
            version=news.version,
            identity=(full.encoding, full.bytes, full.checksum),
            reset_at=self._resets.get(news.fragment, (0, 0)),
            merged_sequence=news.merged_sequence,
            merged_version=news.merged_version,
        )

    def _fetch(self, fragment: int) -> None:
        if fragment not in self._fetching:
            self._fetching.add(fragment)
            self._spawn(self._fetch_fragment, fragment)

    async def _fetch_fragment(self, fragment: int) -> None:
        """Download the newest announced version, and again while a newer one was announced."""
        attempt = 0
        try:
            while (news := self._news.get(fragment)) is not None:
                holding = await self._holding(news, attempt)
                if holding is None:
                    attempt += 1
                    continue
                attempt = 0
                self.holdings.put(holding)
                vector = self._pinned(holding.values)
                self._inbox.put(Downloaded(self._broadcast(news), vector, news.job_tokens))
                if self._news.get(fragment) is news or not self._eager:
                    break
        finally:
            self._fetching.discard(fragment)

    async def _holding(self, news: sync_pb2.Announcement, attempt: int) -> CachedVersion | None:
        assert self.transfers is not None
        known = self.holdings.get(news.fragment)
        if known is not None and known.news.version == news.version and known.news.full == news.full:
            return replace(known, news=news)  # the same bytes, said again after a reconnect
        elements = self._layout.elements(news.fragment)
        try:
            holding = await self.transfers.fragment(self.identity, news, elements, known)
            if holding is not None:
                return holding
            why = "the syncer has it no more"
        except (bulk.TransferError, limits.WireError) as error:
            why = str(error)
            self._doubt(error)
        log.warning("fragment %d version %d did not arrive: %s", news.fragment, news.version, why)
        await asyncio.sleep(pause(attempt))
        return None

    def _doubt(self, error: Exception) -> None:
        """A transfer failed for good. The syncer may have another certificate by now, which the bulk
        channels do not believe: connect anew, and look at it."""
        if self._pinned_server and isinstance(error, bulk.TransferError):
            self._break_off(f"bulk transfers fail: {error}")

    # ------------------------------------------------------- versions, up

    async def give_base(self, request: sync_pb2.BaseRequest) -> None:
        """The syncer's store lost this version: send it, or say that it is not to be had here."""
        fragment, holding = request.fragment, self.holdings.get(request.fragment)
        why = "it is not here any more"
        if holding is not None and holding.is_version(request.epoch, request.version):
            assert self.transfers is not None
            try:
                reply = await self.transfers.base(self.identity, holding)
                if reply.accepted:
                    log.info("fragment %d: the syncer took version %d back", fragment, request.version)
                    return
                why = f"refused ({reply.reason}): {reply.message}"
            except bulk.TransferError as error:
                why = str(error)
        log.warning("fragment %d version %d is not given back: %s", fragment, request.version, why)
        unavailable = sync_pb2.BaseUnavailable(fragment=fragment)
        self._outbox.say(f"no-base-{fragment}", sync_pb2.LearnerMessage(base_unavailable=unavailable))

    async def upload_initial(self, vectors: Sequence[Vector], frozen: bytes) -> None:
        """Version 0. Try a few times; then leave the session, so that the syncer asks another (or this one
        again). Raises ConfigurationError for a start that is not finite."""
        transfers, break_off = self.transfers, self._break_off
        if transfers is None or not self.open:
            return  # the connection broke; whoever joins next is asked
        for fragment, vector in enumerate(vectors):
            if not (await transfers.run(lambda v=vector: codec.norm_and_finite(v.array)))[1]:
                raise ConfigurationError(
                    f"the model's start has values that are not finite (fragment {fragment}): version 0 "
                    "would be useless; check how the model is built, or the weights that it starts from"
                )
        for attempt in range(_INITIAL_TRIES):
            try:
                await transfers.initial(self.identity, self._layout.to_json(), vectors, frozen)
                return
            except bulk.TransferError as error:
                log.warning("version 0 did not come through: %s", error)
            await asyncio.sleep(pause(attempt, first=_INITIAL_PAUSE))
            if len(self._news) == len(self._layout):
                return  # it exists: only the last answer was lost
        break_off(f"version 0 did not come through in {_INITIAL_TRIES} tries")

    # ------------------------------------------------------- pushes

    def push(self, push: Push) -> None:
        """Encoded and sent, a few at a time in order; the PushAnswered comes by inbox."""
        if not self.open or len(self._pushes) >= _MOST_QUEUED_PUSHES:
            self._verdict(push, None, "", "there is no connection")
            return
        self.feedback.expect_push(push.plan.fragment, push.plan.sequence)
        self._pushes.append(push)
        if self._pushing < _PUSHES_AT_ONCE:
            self._pushing += 1
            self._spawn(self._send_pushes)

    async def _send_pushes(self) -> None:
        try:
            while self._pushes:
                push = self._pushes.pop(0)
                await self._send_push(push)
        finally:
            self._pushing -= 1

    async def _send_push(self, push: Push) -> None:
        assert self.transfers is not None
        try:
            reply = await self.transfers.push(push, self.identity, self.encoding, self._layout.digest, self.feedback)
        except bulk.TransferError as error:
            log.warning("push %d of fragment %d got no answer: %s", push.plan.sequence, push.plan.fragment, error)
            self._verdict(push, None, "", "no answer came")
            self._doubt(error)
            return
        except asyncio.CancelledError:
            self._verdict(push, None, "", "the connection broke")
            raise
        # `repeated`: the id came through before, so an earlier answer was lost.
        accepted = reply.accepted or reply.reason == "repeated"
        if not accepted:
            level = logging.DEBUG if reply.reason == "other-round" else logging.INFO  # late: it happens
            log.log(
                level,
                "push %d of fragment %d was refused (%s): %s",
                push.plan.sequence,
                push.plan.fragment,
                reply.reason,
                reply.message,
            )
        self._verdict(push, accepted, reply.reason, reply.message)

    def _verdict(self, push: Push, accepted: bool | None, reason: str, message: str) -> None:
        plan = push.plan
        self._inbox.put(PushAnswered(plan.fragment, plan.sequence, accepted, reason, message))

    # ------------------------------------------------------- states

    async def fetch_frozen(self, limit: int) -> None:
        """The frozen parameters: FrozenDownloaded comes by inbox. ``limit``: most bytes."""
        found = await self._blob(sync_pb2.DownloadRequest.FROZEN, limit, 0)
        self._inbox.put(FrozenDownloaded(found[1] if found else None))

    async def fetch_state(self, what: Any, limit: int, transfer: int) -> None:
        """An inner optimizer's state (``what``: the checkpoint's or a peer's): StateDownloaded comes by inbox."""
        found = await self._blob(what, limit, transfer)
        peer = what == sync_pb2.DownloadRequest.PEER_STATE
        if found is None:
            self._inbox.put(StateDownloaded(peer, None))
        else:
            versions = tuple((held.epoch, held.version) for held in found[0].versions)
            self._inbox.put(StateDownloaded(peer, found[1], versions))

    async def _blob(self, what: Any, limit: int, transfer: int) -> tuple[sync_pb2.DownloadHeader, bytes] | None:
        for attempt in range(_BLOB_TRIES):
            if self.transfers is None:
                return None
            try:
                return await self.transfers.blob(self.identity, what, limit, transfer)
            except limits.WireError as error:
                log.warning("%s was not taken: %s", sync_pb2.DownloadRequest.What.Name(what), error)
                return None
            except bulk.TransferError as error:
                log.warning("%s did not arrive: %s", sync_pb2.DownloadRequest.What.Name(what), error)
                if not error.retry:
                    return None
                await asyncio.sleep(pause(attempt))
        return None

    async def send_state(self, transfer: int, encode: Callable[[], bytes], versions: Iterable[tuple[int, int]]) -> None:
        """This learner's inner optimizer state; ``encode`` runs beside the loop."""
        if self.transfers is None:
            return
        data = await self.transfers.run(encode)
        try:
            reply = await self.transfers.optimizer_state(self.identity, transfer, data, list(versions))
            if not reply.accepted:
                log.warning("the optimizer state was refused (%s): %s", reply.reason, reply.message)
        except bulk.TransferError as error:
            log.warning("the optimizer state did not come through: %s", error)


def _nobody(reason: str) -> None:
    """There is no session to break off."""
