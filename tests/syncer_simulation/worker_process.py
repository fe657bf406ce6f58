"""A learner's process: the real library, from ``Learner`` to its calls, on event loops and threads of the simulation.

Its training loop is as users write it. A parameter is a row of places, one for each step that anybody makes in this
world: step n takes 1 from place n of every fragment. So the parameters say which steps are in them, through merges,
encodings and moves, and so does every push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire.records import Announcement
from diloco_worker import device
from diloco_worker import learner as learner_module
from diloco_worker.data import prefetch
from diloco_worker.learner import Learner
from diloco_worker.net import client, connection, inbox, transfers
from diloco_worker.net.client import SyncerClient
from diloco_worker.settings import WorkerError, WorkerSettings
from diloco_worker.sync.drain import offer_everything
from syncer_simulation import threads
from syncer_simulation.calls import Channel, HeardConnection, Link
from syncer_simulation.processes import Killed, ProcessLoop, present_work

if TYPE_CHECKING:
    from syncer_simulation.worker_world import WorkerWorld

PLACES = 1024  # of a fragment
SEQUENCES = 2  # of a batch


class Rows(torch.nn.Module):
    """The model: one parameter for each fragment."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self.rows = torch.nn.ParameterList([torch.zeros(PLACES) for _ in range(fragments)])


class Marker(torch.optim.Optimizer):
    """Takes 1 from the place of the step that is made. Its state counts the steps, and has their places."""

    def __init__(self, model: Rows) -> None:
        super().__init__(model.parameters(), {})
        self.place = -1
        self.steps = 0  # made here
        self.adopted = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.check_state()
        self.steps += 1
        for group in self.param_groups:
            for row in group["params"]:
                row[self.place] -= 1.0
                state = self.state[row]
                state["step"] = state.get("step", torch.zeros(())) + 1.0
                state.setdefault("places", torch.zeros(PLACES))[self.place] = 1.0

    def check_state(self) -> None:
        """A state, also one of a peer's that came in parts, is of one moment of one learner."""
        states = [self.state[row] for group in self.param_groups for row in group["params"] if row in self.state]
        for state in states:
            assert float(state["places"].sum()) == float(state["step"]) == float(states[0]["step"])
            assert bool((state["places"] == states[0]["places"]).all()), "a state of several moments"
        self.adopted |= bool(states) and float(states[0]["step"]) > self.steps


class WorkerLoop(ProcessLoop):
    """A loop of a worker process, for its threads."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__(process.world.at, lambda: process.world.now)
        self.process = process


class ClientLoop(WorkerLoop):
    """The event loop of a client's thread. Encoding and the like is done at once, after a while."""

    def run_until_complete(self, future: Any) -> Any:
        work = present_work()
        assert work is not None
        if not self.alive:
            future.close()
            raise Killed
        task = future if isinstance(future, asyncio.Future) else self.create_task(future)
        task.add_done_callback(lambda _: work.loop.wake(work))
        while not task.done():
            work.park(None)
        return task.result()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def work() -> None:
            if not self.alive or future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        world = self.process.world
        self._at(world.random.uniform(0.0, world.setup.codec_seconds), work)
        return future

    async def shutdown_asyncgens(self) -> None:
        pass

    def close(self) -> None:
        self.alive = False


class WorkerProcess:
    """One process. ``left``: it has drained, and nobody takes its place. ``place``: region and ordinal."""

    def __init__(self, world: WorkerWorld, place: tuple[str, int], number: int) -> None:
        setup = world.setup
        self.world, self.place, self.process = world, place, f"{number:032x}"
        self.loop = WorkerLoop(self)
        self.loops: list[ClientLoop] = []
        self.speed = world.random.uniform(0.05, 0.2)
        self.link = Link(0.05 * setup.latency, world.random.choice(setup.bytes_per_second))
        self.alive, self.left, self.told_to_end = True, False, False
        self.given_up: list[tuple[int, int, str]] = []
        self.known: dict[int, Announcement] = {}  # by fragment, the newest that this session has told
        self.verdicts: set[tuple[int, int]] = set()  # on pushes, by fragment and sequence
        self.answers: dict[tuple[int, int], int] = {}  # of this session's pulls, by fragment and round: the sequence
        self.learner: Learner | None = None
        self.error: WorkerError | None = None
        self.set_clock()

    def __str__(self) -> str:
        return self.process[-4:]

    def start(self) -> None:
        self.loop.start_work(self._run).future.add_done_callback(lambda _: self.world.end_of(self))

    def _run(self) -> None:
        """In the training thread."""
        try:
            self._train()
        except WorkerError as error:
            self.error = error
        except Exception as error:
            self.world.failures.append(error)

    def _train(self) -> None:
        world = self.world
        model = Rows(world.setup.fragments)
        optimizer = Marker(model)
        settings = WorkerSettings(
            world.job_of(self),
            "learner",
            self.place[0],
            self.place[1],
            process=self.process,
            workdir=None,
            credentials=None,
            idle_at_end=False,
            syncer="syncer:1",
            syncer_file=None,
        )
        work = present_work()
        assert work is not None
        self.learner = learner = Learner(settings, model, optimizer)
        leased = learner.batches(range(world.setup.sequences), SEQUENCES, collate=len)
        with learner, closing(leased if world.setup.sequences else learner.steps()) as batches:
            for _ in batches:
                work.park(self.speed)
                optimizer.place, tokens = world.begin_step(self)
                optimizer.step()
                world.seen["steps with a peer's state"] += optimizer.adopted
                world.oracle.train_sequences(learner._used)
                learner.after_step(tokens)

    def set_clock(self) -> None:
        """The wall clock of its machine is set, to a time that may be wrong."""
        if most := self.world.setup.clocks:
            ahead = self.world.changes.uniform(-most, most)
            for loop in (self.loop, *self.loops):
                loop.ahead = ahead

    def terminate(self) -> None:
        """SIGTERM."""
        if self.learner is not None and not self.told_to_end:
            self.told_to_end = True
            self.learner._terminate(15, None)

    def kill(self) -> None:
        """SIGKILL, or the end of the process."""
        self.alive = False
        for loop in (*self.loops, self.loop):
            loop.kill()

    @property
    def seated(self) -> bool:
        return self.learner is not None and self.learner.slot >= 0

    @property
    def confirmed(self) -> bool:
        """Whether the syncer has read that it leaves."""
        return self.learner is not None and self.learner._client._connection.drain_confirmed

    def held(self) -> list[Any]:
        """What it would say in a Join that it holds."""
        return [] if self.learner is None else self.learner._client._connection._cache.held_versions()


def _own_process() -> WorkerProcess:
    loop: Any = asyncio._get_running_loop()
    if loop is None:
        work = present_work()
        assert work is not None
        loop = work.loop
    assert isinstance(loop, WorkerLoop)
    return loop.process


@contextmanager
def virtual_threads(world: WorkerWorld) -> Iterator[None]:
    """Within it the library's threads, loops, waits and channels are the simulation's."""

    def new_loop() -> ClientLoop:
        process = _own_process()
        process.loops.append(loop := ClientLoop(process))
        loop.ahead = process.loop.ahead
        return loop

    def offer(*arguments: Any) -> list[tuple[int, int, str]]:
        process = _own_process()
        process.given_up = offer_everything(*arguments)
        return process.given_up

    def channel(self: Credentials, address: str, options: object = ()) -> Channel:
        return Channel(_own_process())

    def connect(credentials: object, address: str, shard: int | None) -> HeardConnection:
        return HeardConnection(_own_process(), shard)

    def push(self: SyncerClient, made: transfers.Push) -> None:
        world.check_push(_own_process(), made.plan)
        push_as_ever(self, made)

    push_as_ever = SyncerClient.push
    changes: list[tuple[Any, str, Any]] = [(SyncerClient, "push", push)]
    changes += [(module, "threading", threads) for module in (prefetch, inbox, client)]
    changes += [(client, "SimpleQueue", threads.SimpleQueue), (learner_module, "offer_everything", offer)]
    changes += [(device, "be_deterministic", lambda: None)]  # torch's own settings, of the whole process
    changes += [(transfers, "return_free_memory", lambda: None), (Credentials, "aio_channel", channel)]
    changes += [(connection, "bulk_connection", connect)]
    changes += [(asyncio, "new_event_loop", new_loop), (asyncio, "set_event_loop", lambda loop: None)]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
