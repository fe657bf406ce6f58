"""What a message may be: its format number, its sizes, the patience of both sides.

gRPC limits message sizes per connection and not per method, so a control message is
measured here (``parse``) before protobuf sees it.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

FORMAT = 2  # of messages; the present and the previous one are understood
PREVIOUS_FORMAT = 2  # nothing that was released spoke an earlier one
STATUS_PATH = "/diloco.v1.Status/Get"
CONTROL_PATH = "/diloco.v1.Control/Call"

MAX_CONTROL_BYTES = 1 << 20  # any protobuf message
MAX_REPLY_BYTES = 16 << 20  # a reply of the control service, status and report included
MAX_HEADER_BYTES = 64 << 10  # UploadHeader, DownloadRequest, DownloadHeader
MAX_FRAGMENTS = 512  # a Report has a row of at most 90 bytes per fragment: 46 KiB of a push's header
MAX_RECEIPT_BYTES = 48 << 10  # in a DownloadHeader or a Base; about 50 bytes per slot
MAX_CURSORS = 256  # leases that a slot may hold; 36 bytes each in a Report
MAX_NAME_CHARS = 64  # characters of a region's name, and of a process id
MAX_TEXT = 4096  # characters of any other text in a control message
CHUNK_BYTES = 2 << 20  # measured on loopback: 1-2 MiB is the plateau, 4 MiB halves it
MAX_CHUNK_BYTES = 4 << 20  # accepted
MAX_PART_BYTES = 64 << 20
MIN_PART_BYTES = 4 << 20  # smaller payloads are not split further
MAX_FRAGMENT_BYTES = 1 << 36  # 64 GiB: a fragment's size as anybody may state it

KEEPALIVE_SECONDS = 30
KEEPALIVE_ANSWER_SECONDS = 20
CONNECT_SECONDS = 2  # one try to connect, TCP and TLS; after it the name is resolved anew
JOIN_SECONDS = 10.0  # a session's first message, both ways
STALL_SECONDS = 30.0  # without a chunk in or out, a transfer is given up
SLOWEST_BYTES_PER_SECOND = 256 << 10  # a transfer slower than this is given up

M = TypeVar("M", bound=Message)


class WireError(Exception):
    """A message or payload breaks the rules of the wire; the message says which."""


def parse(kind: type[M], data: bytes, limit: int = MAX_CONTROL_BYTES) -> M:
    """Parse one protobuf message from the network; ``WireError`` if it is too large or garbage."""
    if len(data) > limit:
        raise WireError(f"{kind.__name__} has {len(data)} bytes; at most {limit} are allowed")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"this is not a {kind.__name__}") from error
    return message


def check_format(number: int) -> None:
    """``WireError`` unless the peer's format number is one of those understood."""
    if not PREVIOUS_FORMAT <= number <= FORMAT:
        raise WireError(
            f"format {number} is not understood here (known: {PREVIOUS_FORMAT} to {FORMAT}); "
            "run the same release of the software on both sides"
        )


def transfer_seconds(size: int) -> float:
    """How long a transfer of ``size`` bytes may take before it is given up."""
    return STALL_SECONDS + size / SLOWEST_BYTES_PER_SECOND
