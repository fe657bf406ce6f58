"""What a program in a pod leaves behind as it ends, for who looks at the pod.

Of one that fails, the kubelet keeps the end of the log (FallbackToLogsOnError). One that ends well
says why in the file that a kubelet reads after every end.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")  # made by the kubelet (terminationMessagePath)

MAKES_ROOM = "the job goes on: this process ends, so that a new one can take part"
"""Of a learner that was idle at the job's end (complete, suspended), or whose job was drained."""


def leave_word(text: str, path: Path = TERMINATION_LOG) -> None:
    """Nothing outside of a pod."""
    with contextlib.suppress(OSError):
        if path.exists():
            path.write_text(text)
