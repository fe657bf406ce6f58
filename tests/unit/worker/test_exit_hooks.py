"""What a program in a pod leaves behind for who looks at the pod."""

from __future__ import annotations

from pathlib import Path

from diloco_protocol.vocabulary import ENDS_FOR_RESUME
from diloco_worker.exit_hooks import write_termination_message


def test_a_word_is_left_where_a_kubelet_reads_it_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write_termination_message(ENDS_FOR_RESUME, path)
    assert not path.exists(), "this is no pod"
    path.touch()
    write_termination_message(ENDS_FOR_RESUME, path)
    assert path.read_text() == ENDS_FOR_RESUME
