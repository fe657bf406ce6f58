"""Tags: what a learner gives back to a store that lost it is believed only if this job's syncers have announced it.

Theory of operation. The receipt that goes with a version's bytes has their digest, and a tag: an HMAC of the digest and
of all else that the receipt says, for this job, model and fragment. Its key is derived from the job's control key,
which learners never see, and which lies apart from the store: in a Secret, or in a file beside the store. So a syncer
that has nothing but its key left can tell a version that was announced from a learner's own model.

Where the control key is lost with the store, or is another than it was, no version is believed, and nothing can be
taken back: the syncer says so, and goes on as if nobody held anything.

A tag does not say that a version is the newest, nor of which lineage it is: learners that say
untrue things of these can have an older announced version taken, or none.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, NamedTuple

from diloco_protocol.wire import bulk, convert, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Receipt


class Announced(NamedTuple):
    """What a receipt proves: the version, the digest of its bytes, and what the ledger said of it."""

    version: int
    digest: bytes
    rows: Receipt


class VersionTags:
    """Makes and checks the receipts of one job's versions."""

    def __init__(self, control_key: bytes, job: str) -> None:
        self._key = hmac.digest(control_key, f"versions of {job}".encode(), hashlib.sha256)

    def make(self, announced: Announced, fragment: int, encoding: str, model: str) -> bytes:
        """The receipt as it travels; empty where it is larger than a header has room for. ``model``: which layout and
        frozen parameters the version belongs to."""
        message = convert.receipt_message(announced.rows)
        message.version, message.digest = announced.version, announced.digest
        message.tag = self._tag(message, fragment, encoding, model)
        data = message.SerializeToString()
        return data if len(data) <= limits.MAX_RECEIPT_BYTES else b""

    def check(self, data: bytes, fragment: int, encoding: str, model: str) -> Announced:
        """What a receipt that came back proves. Raises ``WireError`` if no syncer of this job has made it."""
        message, rows = convert.parse_receipt(data)
        if not hmac.compare_digest(message.tag, self._tag(message, fragment, encoding, model)):
            raise WireError(
                f"fragment {fragment}: no syncer with this control key has announced it (its tag is wrong or missing)"
            )
        return Announced(message.version, message.digest, rows)

    def _tag(self, message: sync_pb2.Receipt, fragment: int, encoding: str, model: str) -> bytes:
        untagged = sync_pb2.Receipt()
        untagged.CopyFrom(message)
        untagged.ClearField("tag")
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (model, str(fragment), encoding):
            mac.update(len(part).to_bytes(8, "big") + part.encode())
        mac.update(untagged.SerializeToString(deterministic=True))
        return mac.digest()


def content_digest(data: Any) -> bytes:
    """SHA-256 of a version's bytes, an array."""
    return hashlib.sha256(bulk.flat(data)).digest()
