"""The digest by which a kept result is known to be of today's code."""

from __future__ import annotations

from pathlib import Path

from lab.sources import source_digest


def test_it_is_of_every_python_file_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "one.py").write_text("1")
    (tmp_path / "a" / "inner" / "two.py").write_text("2")
    (tmp_path / "three.py").write_text("3")
    before = source_digest([tmp_path / "a", tmp_path / "three.py"])
    (tmp_path / "a" / "notes.txt").write_text("no code")
    assert source_digest([tmp_path / "a", tmp_path / "three.py"]) == before
    (tmp_path / "a" / "inner" / "two.py").write_text("2.0")
    changed = source_digest([tmp_path / "a", tmp_path / "three.py"])
    assert changed != before != source_digest([tmp_path / "a"])
