"""What a syncer has told and acknowledged, and what went into each version: by this all later syncers are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from diloco_protocol.wire.records import Lease, LeaseCursor, PushHeader, Seat
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import LeaseBook, order_blocks
from diloco_syncer.store.checkpoint import offer_name
from diloco_syncer.store.documents import unpack_document
from diloco_syncer.store.records import Floats, MergeRecord, parse_record_name
from syncer_simulation.core_world import Record, find_parted_offers
from syncer_simulation.learners import Ids

PushId = tuple[int, int, int, int]


class Oracle:
    """Follows the records as the store gets them: ``records`` is the world's. A whole version that a learner uploads
    has the same value everywhere, by which the oracle knows the steps in it."""

    def __init__(self, made: dict[tuple[int, int], Record], elements: int) -> None:
        self.records = made
        self.elements = elements
        self.losses = 0  # how often the store has lost something
        self.ids_of: dict[PushId, Ids] = {}
        self.acknowledged: dict[PushId, tuple[PushHeader, Ids]] = {}  # offers
        self.seats: dict[tuple[int, int], str] = {}  # slot and incarnation: the process
        self.granted: set[int] = set()  # leases
        self.leases: dict[int, Lease] = {}  # as they were last told
        self.announced: set[tuple[int, int]] = set()  # fragments and versions that anybody was told of
        self.trained_to = Counter[tuple[int, int]]()  # of each block of a data epoch, by anybody
        self._made: dict[tuple[str, bytes], dict[tuple[int, int], Record]] = {}  # by the object that made it
        self._set_aside: set[str] = set()  # copies of records that were
        self._versions: list[Ids] = []  # that were uploaded whole, by their value

    # ------------------------------------------------------------ what is told

    def take_seat(self, seat: Seat, process: str) -> None:
        owner = self.seats.setdefault((seat.slot, seat.incarnation), process)
        assert owner == process, f"{seat} was {owner}'s, and is {process}'s"
        for lease in seat.leases:
            self._read_lease(lease)

    def take_lease(self, grant: ev.GrantLease) -> None:
        number = grant.lease.lease
        assert number not in self.granted, f"lease {number} was given before: {self.leases[number]}, {grant}"
        self.granted.add(number)
        self._read_lease(grant.lease)

    def _read_lease(self, lease: Lease) -> None:
        self.leases[lease.lease] = lease
        trained = self.trained_to[lease.data_epoch, lease.block]
        assert lease.start <= trained, f"{lease} leaves out what follows {trained}, which nobody has trained"

    def train_sequences(self, cursors: Sequence[LeaseCursor]) -> None:
        for number, position in cursors:
            block = self.leases[number].data_epoch, self.leases[number].block
            self.trained_to[block] = max(self.trained_to[block], position)

    # ------------------------------------------------------------ what is made durable

    def upload_push(self, header: PushHeader, ids: Ids) -> None:
        before = self.ids_of.get(header.id, ids)
        assert before == ids or self.losses, f"two pushes are named {header.id}"
        self.ids_of[header.id] = ids

    def upload_version(self, ids: Ids) -> Floats:
        """The values of a fragment that has these steps in it."""
        self._versions.append(ids)
        return np.full(self.elements, len(self._versions) - 1, np.float32)

    def read_theta(self, theta: Floats) -> Ids:
        """The steps in a version that was uploaded whole."""
        return self._versions[int(theta[0])]

    def read_object(self, objects: Mapping[str, bytes], name: str) -> None:
        """An object was created, or deleted."""
        if name not in objects:
            if (found := parse_record_name(name)) is not None and self._was_set_aside(objects, name):
                p, newest = found[0], max((v for q, v in _records_of(objects) if q == found[0]), default=0)
                told = self.losses == 0 and found in self.announced
                assert not told, f"version {found[1]} of fragment {found[0]} was announced, and is set aside"
                # With it goes what the store has lost between this one and those that it goes on from.
                for lost in [(q, v) for q, v in self.records if (q, v) == found or (q == p and v > newest)]:
                    del self.records[lost]
            return
        parts = [name] if parse_record_name(name) is not None else []
        if name == "initial.json":
            parts = unpack_document(objects[name], name)["fragments"]
        made = [self._read_version(MergeRecord.unpack(objects[part], part)) for part in parts]
        self._made[name, objects[name]] = {found: self.records[found] for found in made}

    def _was_set_aside(self, objects: Mapping[str, bytes], name: str) -> bool:
        """Whether a syncer has found just now that nobody knows of this record; others go when they are not needed."""
        copies = {one for one in objects if one.startswith("discarded/") and one.endswith(name.replace("/", "-"))}
        new = copies - self._set_aside
        self._set_aside |= new
        return bool(new)

    def _read_version(self, record: MergeRecord) -> tuple[int, int]:
        p, v, before = record.fragment, record.version, self.records.get((record.fragment, record.version))
        again = before is None or (self.losses and before.epoch < record.epoch)
        assert again, f"version {v} of fragment {p} was made twice"
        if v == 0 or record.recovered is not None:
            taken = None if record.recovered is None else (record.recovered.epoch, record.recovered.receipt)
            there = self.read_theta(record.theta)
            self.records[p, v] = Record(record.made_in, there, [], record.epoch, taken=taken)
            for push_id in find_parted_offers({one: ids for one, (_, ids) in self.acknowledged.items()}, p, there):
                del self.acknowledged[push_id]
            return p, v
        after = self.records[p, v - 1].ids
        for push in record.responders:
            ids = self.ids_of[push.header.id]
            assert not ids & after, f"version {v} of fragment {p}: a step was merged twice"
            after |= ids
        self.records[p, v] = Record(record.made_in, after, [], record.epoch)
        return p, v

    def go_back(self, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
        """The store has lost something: only what it still has is promised."""
        self.losses += 1
        whole = {name for name, data in now.items() if before.get(name, data) == data}
        there = _records_of(whole)
        for p, v in list(self.records):
            newest = max((w for q, w in there if q == p), default=0)
            if v > newest or (v == 0 and not {"initial.json", "initial.copy.json"} & now.keys()):
                del self.records[p, v]
        for name in whole:  # what was removed may be there again
            self.records.update(self._made.get((name, now[name]), {}))
        self.seats.clear()
        self.granted.clear()
        kept = {push_id: offer for push_id, offer in self.acknowledged.items() if offer_name(offer[0]) in whole}
        self.acknowledged = kept

    def forget(self, name: str) -> None:
        """An object that nobody was told of is gone."""
        found = parse_record_name(name)
        gone = [found] if found is not None else [key for key in self.records if key[1] == 0] * (name == "initial.json")
        for key in gone:
            self.records.pop(key, None)

    def check_end(self, leases: LeaseBook, waiting: Sequence[PushHeader] = ()) -> None:
        """Every offer that was acknowledged has been merged, or is one of those that wait for more learners
        (``waiting``), and every block that is not leased any more was trained. ``leases``: the book."""
        open_blocks = {(lease.data_epoch, lease.block) for lease in (*leases.open.values(), *leases.returned)}
        assert len(open_blocks) == len(leases.open) + len(leases.returned), "a block is leased twice"
        for index in range(leases.issued):
            data_epoch, place = divmod(index, leases.blocks)
            block = order_blocks(leases.seed, data_epoch, leases.blocks)[place]
            size = min(leases.block_size, leases.sequences - block * leases.block_size)
            there = (data_epoch, block) in open_blocks or self.trained_to[data_epoch, block] == size
            assert there, f"block {block} of data epoch {data_epoch} was left out"
        for push_id, (header, ids) in self.acknowledged.items():
            p = header.fragment
            known = self.records[p, max(v for q, v in self.records if q == p)].ids
            known = known.union(*(self.ids_of[one.id] for one in waiting if one.fragment == p))
            assert ids <= known, f"the offer {push_id} was acknowledged, and is lost"


def _records_of(names: Iterable[str]) -> set[tuple[int, int]]:
    return {found for name in names if (found := parse_record_name(name)) is not None}
