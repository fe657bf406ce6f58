"""What a message may be: its format number, its sizes, the range of its fields, the patience of both sides.

The ``check_*`` functions take a field's value as it came from the network and the field's name. They return
the value as it is to be used, or raise ``WireError`` with the name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sized
from typing import TypeVar

FORMAT = 2  # of messages; the present and the previous one are understood
PREVIOUS_FORMAT = 2  # nothing that was released spoke an earlier one
CONTROL_PATH = "/diloco.v1.Control/Call"

MAX_CONTROL_BYTES = 1 << 20  # any protobuf message
MAX_REPLY_BYTES = 16 << 20  # a reply of the control service, status and report included
MAX_HEADER_BYTES = 64 << 10  # UploadHeader, DownloadRequest, DownloadHeader
MAX_RECEIPT_BYTES = 48 << 10  # in a DownloadHeader or a Base; about 50 bytes per slot
MAX_CURSORS = 256  # leases that a slot may hold; 36 bytes each in a Report
MAX_NAME_CHARS = 64  # characters of a region's name, and of a process id
MAX_TEXT = 4096  # characters of any other text in a control message
CHUNK_BYTES = 256 << 10  # of an upload, behind one length; and read or sent at a time
MAX_PART_BYTES = 64 << 20
MAX_UPLOAD_PART_BYTES = 8 << 20  # so much is sent again where an upload breaks; a download breaks at a byte
MIN_PART_BYTES = 4 << 20  # smaller payloads are not split further
MAX_FRAGMENT_BYTES = 1 << 36  # 64 GiB: a fragment's size as anybody may state it

KEEPALIVE_SECONDS = 30
KEEPALIVE_ANSWER_SECONDS = 20
CONNECT_SECONDS = 10  # one try to connect, TCP and TLS: four round trips of up to 2 s; then the name is resolved anew
FIRST_PAUSE_SECONDS = 2  # after a try of gRPC's that failed; it grows with each further one
LONGEST_PAUSE_SECONDS = 15
JOIN_SECONDS = 10.0  # a session's first message, both ways, once there is a connection
STALL_SECONDS = 30.0  # without a chunk of its session in or out, a transfer is given up
PROBE_BYTES = 16 << 20  # that a measurement of a link moves at a time, in each direction
PROBE_SECONDS = 60.0  # and how long one may take
REJOIN_SECONDS = 90.0  # whose process ended is waited for so long, where only it may have an optimizer's state
SLOWEST_BYTES_PER_SECOND = 256 << 10  # at which what was sent last may still be under way

MAX_SEQUENCES = 1 << 40  # of a data set
MAX_DATA_SAMPLES = 8  # that a Join may hold
MAX_COUNT = 1 << 62  # counters above are nonsense
MAX_SLOT_TOKENS = 1 << 53  # that a slot can have trained, ever (stop.tokens has the same bound)
MAX_STEP_TOKENS = 1 << 32  # that one step can have trained
MAX_STEPS = 1 << 32  # that a tenure can have, and that a slot can have gained since it was last heard
MAX_SECONDS = 1e12

S = TypeVar("S", bound=Sized)


class WireError(Exception):
    """A message or payload breaks the rules of the wire; the message says which."""


def check_format(number: int) -> None:
    """``WireError`` unless the peer's format number is one of those understood."""
    if not PREVIOUS_FORMAT <= number <= FORMAT:
        raise WireError(
            f"format {number} is not understood here (known: {PREVIOUS_FORMAT} to {FORMAT}); "
            "run the same release of the software on both sides"
        )


def transfer_seconds(size: int) -> float:
    """How long the answer to an upload of ``size`` bytes is waited for, once nothing of its session moves."""
    return STALL_SECONDS + size / SLOWEST_BYTES_PER_SECOND


# ------------------------------------------------------------------ fields


def check_most(most: int, what: str) -> Callable[[int, str], int]:
    """Make the check of a number that is not above ``most``; ``what`` says it in words."""

    def check(value: int, field: str) -> int:
        if value > most:
            raise WireError(f"{field} is {value}: {what}")
        return value

    return check


check_count = check_most(MAX_COUNT, "out of range")


def check_seconds(value: float, field: str) -> float:
    """A time in seconds: a number, not negative, below ``MAX_SECONDS``."""
    if not 0 <= value < MAX_SECONDS:
        raise WireError(f"{field} is {value}: it must be a number of seconds, not negative")
    return value


def check_share(value: float, field: str) -> float:
    """A share: a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise WireError(f"{field} is {value}: it must be a number from 0 to 1")
    return value


def check_loss(value: float, field: str) -> float:
    """A loss. A diverged learner's is told as it is: not a number."""
    return value if math.isfinite(value) else math.nan


def check_digests(value: Mapping[str, str], field: str) -> dict[str, str]:
    """Digests by name: at most 64, of short texts."""
    if len(value) > 64 or any(len(text) > 256 for item in value.items() for text in item):
        raise WireError(f"{field}: at most 64 entries, whose names and values have at most 256 characters")
    return dict(value)


def check_length(most: int) -> Callable[[S, str], S]:
    """Make the check of a list with at most so many entries."""

    def check(value: S, field: str) -> S:
        if len(value) > most:
            raise WireError(f"{field} has {len(value)} entries; at most {most} are understood")
        return value

    return check


def check_pattern(pattern: str, what: str) -> Callable[[str, str], str]:
    """Make the check of a text that matches a regular expression as a whole; ``what`` says it in words."""
    expected = re.compile(pattern)

    def check(value: str, field: str) -> str:
        if not expected.fullmatch(value):
            raise WireError(f"{field} {value[:80]!r}: expected {what}")
        return value

    return check


def cut_text(most: int) -> Callable[[str, str], str]:
    """Make the check of a text of which at most so many characters are read."""
    return lambda value, field: value[:most]
