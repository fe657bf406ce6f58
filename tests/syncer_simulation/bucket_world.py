"""The world of shell_world.py on a real ``BucketStore``, over a service that loses answers, refuses and is away.

The client repeats a put whose answer was lost, and then may be told that the name exists. What a service must not do is
done on demand: say of an object what was true some seconds ago (``lag``), or overwrite what was to be created
(``overwrites``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from obstore.exceptions import AlreadyExistsError, GenericError

from diloco_syncer.store.bucket import BucketStore
from syncer_simulation.processes import present_work
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import ShellSetup


@dataclass
class BucketSetup(ShellSetup):
    lag: float = 0.0  # seconds, of a HEAD
    overwrites: bool = False
    unprobed: bool = False  # the store does not look at its start how the service behaves


@dataclass(frozen=True)
class Answer:
    """What a GET answers."""

    data: bytes

    @property
    def meta(self) -> dict[str, int]:
        return {"size": len(self.data)}

    def bytes(self) -> bytes:
        return self.data


class Service:
    """The client's functions, as far as ``BucketStore`` calls them, and the service behind it."""

    def __init__(self, world: BucketWorld) -> None:
        self.world = world
        self._cached: dict[str, tuple[float, int | None]] = {}  # until when a HEAD is answered so

    def _request(self) -> None:
        work, world = present_work(), self.world
        if work is None:
            return
        work.park(world.random.uniform(0.0, world.setup.store_seconds))
        if world.out[0] <= world.now < world.out[1]:
            raise GenericError("status code: 503")

    def put(self, store: object, name: str, parts: Iterable[bytes], mode: str, **words: object) -> None:
        self._request()
        world, data = self.world, b"".join(parts) if parts else b""
        lost = present_work() is not None and world.chance(world.setup.faults)
        if lost and world.random.random() < 0.5:
            raise GenericError("status code: 500")
        for _ in range(1 + lost):  # the client asks again
            there = name in world.objects
            if mode == "create" and there and not world.setup.overwrites:
                raise AlreadyExistsError("exists")
            world.objects[name] = data
            if mode == "create":
                world.oracle.read_object(world.objects, name)
            if lost:
                self._request()

    def delete(self, store: object, name: str) -> None:
        self._request()
        if self.world.objects.pop(name, None) is None:
            raise FileNotFoundError(name)
        self.world.oracle.read_object(self.world.objects, name)

    def _find(self, name: str) -> bytes:
        self._request()
        try:
            return self.world.objects[name]
        except KeyError:
            raise FileNotFoundError("none") from None

    def get(self, store: object, name: str) -> Answer:
        return Answer(self._find(name))

    def get_range(self, store: object, name: str, start: int, end: int) -> bytes:
        return self._find(name)[start:end]

    def head(self, store: object, name: str) -> dict[str, int]:
        now, lag = self.world.now, self.world.setup.lag
        self._request()
        until, size = self._cached.get(name, (0.0, None))
        if not lag or now >= until:
            size = len(self.world.objects[name]) if name in self.world.objects else None
            self._cached[name] = now + lag, size
        if size is None:
            raise FileNotFoundError("none")
        return {"size": size}

    def list_with_delimiter(self, store: object, folder: str) -> dict[str, Any]:
        self._request()
        start = f"{folder}/"
        names = [n for n in self.world.objects if n.startswith(start) and "/" not in n[len(start) :]]
        return {"objects": [{"path": name} for name in names]}


class SimulatedBucket(BucketStore):
    """One process's view of the bucket."""

    def __init__(self, world: BucketWorld) -> None:
        self._scheme, self.where = "s3", "s3://bucket"
        self._client = world.service
        self._errors = (GenericError, OSError)
        self._exists_already = AlreadyExistsError
        self._quick = self._bulk = self._reading = None
        if not world.setup.unprobed:
            self._check_conditional_put()
            self._check_answers()


class BucketWorld(ShellWorld):
    """Several syncers on one bucket."""

    setup: BucketSetup

    def __init__(self, setup: BucketSetup) -> None:
        self.service = Service(self)
        super().__init__(setup)

    def open_store(self) -> SimulatedBucket:
        return SimulatedBucket(self)
