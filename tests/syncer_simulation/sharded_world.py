"""The world of shell_sessions.py with a syncer whose fragments are shared by shards, each a process of its own.

A shard is the product's, on an event loop of its own in the world's time; what it and the syncer say to each other is
written, takes a while, and comes in order. Shards crash alone, also while they write, and with the syncer, which they
outlive for a moment. Each life of the syncer has another number of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol.vocabulary import ENDED_PHASES, TransferRefusal
from diloco_protocol.wire import sync_pb2
from diloco_syncer.runtime.multipart import TooManyUploads
from diloco_syncer.server.callers import Caller
from diloco_syncer.server.sessions import CallerRefused
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.shards.messages import OfferSpooled, VersionMade, read_message, write_message
from diloco_syncer.shards.shard import Shard
from diloco_syncer.syncer import Syncer
from syncer_simulation.calls import ENDS_THE_PROCESS, VirtualConnection
from syncer_simulation.processes import ProcessLoop
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import CALM, Life, ShellSetup, SyncerProcesses

LATE = 0.05  # seconds that a message takes, at most


@dataclass
class ShardedSetup(ShellSetup):
    """``shards``: of a life of the syncer, at most; ``shard_crashes``: as ``crashes``."""

    shards: int = 5
    shard_crashes: float = 3.0


class Wire:
    """One direction between a syncer and a shard: messages come in order, each after a while, while both live."""

    def __init__(self, world: ShardProcesses, loop: ProcessLoop, take: Callable[[Any], Any]) -> None:
        self._world, self._loop, self._take = world, loop, take
        self._come: deque[bytes] = deque()
        self._newest = 0.0
        self._wake = asyncio.Event()
        self.cut = False
        loop.create_task(self._follow())

    def send(self, message: Any) -> None:
        data = write_message(message)
        self._newest = max(self._newest, self._world.now + self._world.chances.uniform(0.0, LATE))
        self._world.at(self._newest - self._world.now, lambda: self._arrive(data))

    def _arrive(self, data: bytes) -> None:
        if not self.cut and self._loop.alive:
            self._come.append(data)
            self._loop.call_soon(self._wake.set)

    async def _follow(self) -> None:
        try:
            while not self.cut:
                while self._come and not self.cut:
                    await self._take(read_message(self._come.popleft()))
                self._wake.clear()
                await self._wake.wait()
        except Exception as error:
            self._world.fail(error, self._loop)


class VirtualShard:
    """The process of one shard, from its connection to the syncer on."""

    def __init__(self, world: ShardProcesses, life: Life, syncer: Syncer, index: int) -> None:
        assert syncer.shards is not None
        coordinator = syncer.shards
        self._world, self.life, self.syncer, self.index = world, life, syncer, index
        self.loop = ProcessLoop(world.at, lambda: world.now)
        self.connections: list[VirtualConnection] = []  # of learners
        world.loops.append(self.loop)
        self.up = Wire(world, life.loop, lambda message: coordinator.take_message(index, self.down, message))
        self.shard = Shard(
            world.job,
            world.open_store(),
            CallAuthorizer(),
            1,
            send=self.say,
            stop_by=lambda error: world.end_shard(self, error),
        )
        self.down = Wire(world, self.loop, self.shard.take_message)
        coordinator.connect_shard(index, self.down)

    def say(self, message: Any) -> None:
        """Some die when something has become durable, before they have said so."""
        if isinstance(message, VersionMade | OfferSpooled) and self._world.crashes_now(0.02):
            self._world.seen["untold"] += 1
            self.up.cut = True
            self._world.at(0.0, lambda: self._world.end_shard(self, None))
        if not self.up.cut:
            self.up.send(message)

    def kill(self) -> None:
        self.up.cut = self.down.cut = True
        self.loop.kill()
        for connection in self.connections:
            connection.sever(0.0)


class WorldCallers:
    """Who moves bytes, as the world has it: of pushes alone."""

    def __init__(self, world: ShardProcesses, life: Life) -> None:
        self._world, self._life = world, life

    async def find_sender(self, header: sync_pb2.UploadHeader, peer: Peer, called: str) -> Caller:
        for connection, learner in self._world.connections.items():
            if learner.process == header.process and self._world.life_of[connection] is self._life:
                return Caller(connection, "")
        raise CallerRefused(TransferRefusal.NOT_JOINED, "join first")


class ShardProcesses(SyncerProcesses):
    """Syncers of which each has shards."""

    setup: ShardedSetup

    def __init__(self, setup: ShardedSetup) -> None:
        self.chances = random.Random(f"shards of {setup.seed}")
        self.shards: list[VirtualShard] = []
        self.loops: list[ProcessLoop] = []  # of all shards
        super().__init__(setup)
        self.at(2.0, self.trouble_shards)

    def run(self, limit: float = 3000.0) -> None:
        try:
            super().run(limit)
        finally:
            for loop in self.loops:
                loop.kill()

    def start_syncer(self) -> None:
        super().start_syncer()
        count = self.chances.randint(1, self.setup.shards)
        self.seen["shards"] += count > 1
        spec = self.job.spec
        syncer = spec.syncer.model_copy(update={"shards": count})
        self.job = self.job.model_copy(update={"spec": spec.model_copy(update={"syncer": syncer})})
        self.config = replace(self.config, shards=count)

    def begin_shards(self, life: Life, syncer: Syncer) -> None:
        for row in () if syncer.shards is None else syncer.shards.shards:
            self.begin_shard(life, syncer, row.index)

    def begin_shard(self, life: Life, syncer: Syncer, index: int) -> None:
        if life.loop.alive and not life.stopping:
            self.shards.append(VirtualShard(self, life, syncer, index))

    def end_shard(self, shard: VirtualShard, error: BaseException | None) -> None:
        """A shard's process is gone: the syncer hears of it, and starts another."""
        if shard not in self.shards:
            return
        self.shards.remove(shard)
        shard.kill()
        if error is not None:
            self.seen[f"shards ended by {type(error).__name__}"] += 1
            if not isinstance(error, ENDS_THE_PROCESS):
                self.failures.append(error)
        life, syncer = shard.life, shard.syncer
        if syncer.shards is None or not life.loop.alive:
            return
        coordinator = syncer.shards
        self.at(self.chances.uniform(0.0, 0.6), lambda: life.loop.call_soon(self.hear_loss, life, coordinator, shard))
        after = self.chances.uniform(0.4, 4.0)
        self.at(after, lambda: life.loop.call_soon(self.begin_shard, life, syncer, shard.index))

    @staticmethod
    def hear_loss(life: Life, coordinator: Any, shard: VirtualShard) -> None:
        coordinator.lose_shard(shard.index, shard.down, "its process has ended")

    def trouble_shards(self) -> None:
        self.at(self.chances.uniform(0.2, 2.0), self.trouble_shards)
        mine = [one for one in self.shards if one.life is self.newest and one.life.serving]
        if mine and self.crashes_now(0.05):
            self.seen["shard crashes"] += 1
            self.end_shard(self.chances.choice(mine), None)

    def crashes_now(self, share: float) -> bool:
        calm = self.now > CALM or self.core.phase in ENDED_PHASES
        return not calm and self.chances.random() < share * self.setup.shard_crashes

    def end_life_of(self, life: Life, restart: bool) -> None:
        super().end_life_of(life, restart)
        for shard in [one for one in self.shards if one.life is life]:
            shard.up.cut = shard.down.cut = True
            self.shards.remove(shard)
            self.at(self.chances.uniform(0.0, 1.0), shard.kill)  # it hears the end of the stream

    def fail(self, error: Exception, loop: ProcessLoop) -> None:
        """A message could not be carried out: that ends the syncer's life, or the shard's process."""
        for shard in self.shards:
            if shard.loop is loop:
                self.end_shard(shard, error)
                return
        for life in self.lives:
            if life.loop is loop and life.syncer is not None:
                life.syncer.driver.stop_by(error)
                return
        if isinstance(error, ENDS_THE_PROCESS):  # of a shard whose syncer is gone
            loop.kill()
        else:
            self.failures.append(error)


class ShardedWorld(ShardProcesses, ShellWorld):
    def begin_shards(self, life: Life, syncer: Syncer) -> None:
        if syncer.shards is not None:
            syncer.shards.callers = WorldCallers(self, life)  # type: ignore[assignment]
        super().begin_shards(life, syncer)

    # ------------------------------------------------------------ pushes

    def find_shard(self, life: Life, fragment: int) -> VirtualShard | None:
        """Who has the fragment; None: nobody does now."""
        assert life.syncer is not None and life.syncer.shards is not None
        index = next((row.index for row in life.syncer.shards.shards if fragment in row.fragments), None)
        return next((one for one in self.shards if one.life is life and one.index == index and one.shard.begun), None)

    def begin_upload(self, connection: int, upload: Callable[[Life], Any], fragment: int | None = None) -> None:
        life = self.life_of[connection]
        if fragment is None or life.syncer is None or life.syncer.shards is None:
            super().begin_upload(connection, upload)
        elif life.serving and (shard := self.find_shard(life, fragment)) is not None:
            shard.loop.create_task(upload(life))

    def find_receiver(self, life: Life, header: sync_pb2.UploadHeader) -> Any:
        if not header.HasField("push") or life.syncer is None or life.syncer.shards is None:
            return super().find_receiver(life, header)
        found = self.find_shard(life, header.push.fragment)

        async def receive(header: sync_pb2.UploadHeader, connection: int, read: Any) -> Any:
            if found is None:
                raise TooManyUploads  # there is no answer
            try:
                caller = await found.shard.callers.find_sender(header, Peer(), "")
            except CallerRefused:
                raise TooManyUploads from None
            return await found.shard.pushes.receive(header, caller.connection, read)

        return receive
