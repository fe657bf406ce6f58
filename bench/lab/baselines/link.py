"""A machine's link that is cut: the process shuts its own TCP connections down, as a lost link's would be.

Collectives open connections of their own between all machines, on ports that nobody is told, so no proxy can stand
between them. Whoever injects the cut writes until when it lasts into a file (``BaselineSettings.cut``); a thread of
each process on that machine sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

POLL_SECONDS = 0.02


def cut_until(path: Path) -> float:
    """Until when the link is cut, Unix seconds; 0: it is not."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0.0


def shut_connections_down() -> int:
    """Shut every open TCP connection of this process down; both ends meet an end of the stream. Returns how many. A
    socket that listens stays: that it ended would be a fault of the process, and gloo aborts at it."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # OSError: it is not connected
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def watch_link(path: Path) -> None:
    """Start the thread; a process that begins during a cut waits for its end first."""
    while (left := cut_until(path) - time.time()) > 0:
        time.sleep(min(left, 1.0))

    def watch() -> None:
        while True:
            time.sleep(POLL_SECONDS)
            if cut_until(path) > time.time():
                shut_connections_down()

    threading.Thread(target=watch, name="link", daemon=True).start()
