"""The world of worker_world.py with the shards of sharded_world.py: real learners, whose bytes go to real shards."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_syncer.server.bulk import BulkServer
from syncer_simulation.calls import VirtualConnection
from syncer_simulation.processes import ProcessLoop
from syncer_simulation.sharded_world import ShardedSetup, ShardProcesses
from syncer_simulation.worker_process import WorkerProcess
from syncer_simulation.worker_world import WorkerSetup, WorkerWorld


@dataclass
class ShardedWorkerSetup(ShardedSetup, WorkerSetup):
    """How often what happens is said as a factor, as in both."""


class ShardedWorkerWorld(ShardProcesses, WorkerWorld):
    setup: ShardedWorkerSetup

    def find_bulk_server(self, connection: VirtualConnection) -> tuple[ProcessLoop, BulkServer] | None:
        if connection.shard is None:
            return super().find_bulk_server(connection)
        for one in self.shards:
            if (one.life, one.index) == (connection.life, connection.shard) and one.shard.begun:
                self.seen["connections to shards"] += 1
                one.connections.append(connection)
                return one.loop, one.shard.bulk
        self.seen["connections to shards in vain"] += 1
        return None

    def is_without_verdict(self, process: WorkerProcess, fragment: int, sequence: int) -> bool:
        """A shard that ended had it, and the syncer asks again."""
        return (fragment, sequence) not in process.verdicts
