"""The syncer's program on a disk that fails, or under which it is killed, at a call that the test has chosen.

Not a test. Its first argument says how, as ``Fault.to_json`` has it; all others are the program's. Counted are the
calls of one kind that concern the store. Of a write that it is killed in, half of the bytes are on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

CALLS = ("write", "fsync", "link", "replace", "unlink")
KILLS = ("before", "within", "after")
ERRORS = ("ENOSPC", "EIO")


@dataclass(frozen=True)
class Fault:
    """At the call number ``at`` of this kind: a kill ``before``, ``within`` or ``after`` it, or from then on for
    ``seconds`` an error of all calls of the kind."""

    call: str
    at: int
    what: str
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def install(fault: Fault, store: str, told: str) -> None:
    """Let the fault happen in this process. The file ``told`` is made when it does."""
    real = getattr(os, fault.call)
    count, until = 0, 0.0

    def concerns_store(first: Any) -> bool:
        if hasattr(first, "fileno"):
            first = first.fileno()
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        return str(path).startswith(store)

    def tell() -> None:
        os.close(os.open(told, os.O_CREAT | os.O_WRONLY))

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)

    def hooked(first: Any, *rest: Any, **options: Any) -> Any:
        nonlocal count, until
        if not concerns_store(first):
            return real(first, *rest, **options)
        count += 1
        if fault.what in ERRORS:
            if count == fault.at:
                until = time.monotonic() + fault.seconds
                tell()
            if fault.at <= count and time.monotonic() < until:
                raise OSError(getattr(errno, fault.what), "simulated")
        elif count == fault.at:
            tell()
            if fault.what == "within" and fault.call == "write":
                real(first, rest[0][: len(rest[0]) // 2])
            elif fault.what == "after":
                with contextlib.suppress(OSError):
                    real(first, *rest, **options)
            die()
        return real(first, *rest, **options)

    setattr(os, fault.call, hooked)


def main() -> int:
    from diloco_syncer.__main__ import main as serve

    fault, told, *words = sys.argv[1:]
    install(Fault(**json.loads(fault)), words[words.index("--store") + 1], told)
    return serve(words)


if __name__ == "__main__":
    sys.exit(main())
