"""What a program in a pod leaves behind for who looks at the pod."""

from __future__ import annotations

from pathlib import Path

from diloco_protocol.vocabulary import MAKES_ROOM
from diloco_worker.exit_hooks import leave_word


def test_a_word_is_left_where_a_kubelet_reads_it_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    leave_word(MAKES_ROOM, path)
    assert not path.exists(), "this is no pod"
    path.touch()
    leave_word(MAKES_ROOM, path)
    assert path.read_text() == MAKES_ROOM
