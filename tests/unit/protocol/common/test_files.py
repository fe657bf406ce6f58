"""Whole files or none."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_protocol.common import files
from recorded_disk import RecordedDisk


def test_written_whole_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_whole(path, b"one", bytearray(b"two"), memoryview(b""), mode=0o600)
    assert path.read_bytes() == b"onetwo" and stat.S_IMODE(path.stat().st_mode) == 0o600
    files.write_whole(path, b"three")
    assert path.read_bytes() == b"three"
    files.write_whole(path)
    assert path.read_bytes() == b"" and os.listdir(tmp_path) == ["a"]


def modes(folder: Path) -> dict[str, int]:
    return {str(each.relative_to(folder)): stat.S_IMODE(each.stat().st_mode) for each in sorted(folder.rglob("*"))}


@pytest.mark.promise(
    "Written files (store, weights, optimizer state, job) belong to their owner alone, and on a volume of "
    "a pod with an fsGroup to that group",
    section="Hostile callers",
)
@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_written_is_its_owners_and_of_a_volume_its_groups(tmp_path: Path, umask: int) -> None:
    """A pod's fsGroup gives its volumes the group's rights and the set-group-ID bit."""
    before = os.umask(umask)
    try:
        for folder, mode in (("own", 0o700), ("volume", 0o2770)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder).chmod(mode)
            files.make_directory(tmp_path / folder / "store" / "states")
            files.write_whole(tmp_path / folder / "store" / "a", b"a")
            files.create_whole(tmp_path / folder / "store" / "states" / "b", b"b")
            files.create_whole(tmp_path / folder / "control.key", b"c", mode=0o600)
    finally:
        os.umask(before)
    names = ("control.key", "store", "store/a", "store/states", "store/states/b")
    assert modes(tmp_path / "own") == dict(zip(names, (0o600, 0o700, 0o600, 0o700, 0o600), strict=True))
    assert modes(tmp_path / "volume") == dict(zip(names, (0o600, 0o2770, 0o660, 0o2770, 0o660), strict=True))


def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    files.make_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_directory(tmp_path / "file")


def test_created_once(tmp_path: Path) -> None:
    files.create_whole(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        files.create_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one" and os.listdir(tmp_path) == ["a"]


def test_a_large_buffer_is_written_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * (1 << 12) * 100
    files.write_whole(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    for write in (files.write_whole, files.create_whole):
        with pytest.raises(
            files.NotWritable, match=f"cannot write {tmp_path}/no/a: there is no directory {tmp_path}/no"
        ):
            write(tmp_path / "no" / "a", b"x")


def test_something_in_the_way_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        files.write_whole(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == ["a"]


def test_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 40)  # a hole: reading it would not fit in memory
    with pytest.raises(files.TooLarge, match="1099511627776 bytes; at most 10"):
        files.read_bounded(tmp_path / "a", 10)
    files.write_whole(tmp_path / "b", b"0123456789")
    assert files.read_bounded(tmp_path / "b", 10) == b"0123456789"


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    real = os.fstat

    def earlier(file: int) -> os.stat_result:
        fields = list(real(file))
        fields[stat.ST_SIZE] = 3
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", earlier)
    assert files.read_bounded(path, 10) == b"0123456789"
    with pytest.raises(files.TooLarge, match="more than 9 bytes"):
        files.read_bounded(path, 9)


@pytest.mark.parametrize("write", [files.write_whole, files.create_whole])
def test_bytes_are_on_the_device_before_they_have_a_name_and_the_name_before_the_call_returns(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RecordedDisk(monkeypatch, tmp_path)
    write(tmp_path / "a", b"one", b"two")
    assert [disk.events[0], disk.events[1][:2], disk.events[2][:2]] == [
        ("flush", "*.tmp", b"onetwo"),
        ("name", "a"),
        ("flush", "."),
    ]
    assert "a" in disk.events[2][2] and len(disk.events) == 3


def test_a_new_directory_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RecordedDisk(monkeypatch, tmp_path)
    with files.create_directory(tmp_path / "model") as folder:
        (folder / "weights").write_bytes(b"w")
        (folder / "config").write_bytes(b"c")
    assert sorted(disk.events[:2]) == [("flush", "*/config", b"c"), ("flush", "*/weights", b"w")]
    assert disk.events[2:] == [("flush", "*", ["config", "weights"]), ("name", "model", ""), ("flush", ".", ["model"])]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.1234.tmp", "b.tmp", ".c"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".d.tmp").mkdir()
    assert files.remove_leftovers(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == [".c", ".d.tmp", "b.tmp"]


def test_free_bytes_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "x" / "y") > 0


def test_files_of_a_new_directory_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with files.create_directory(tmp_path / "model") as folder:
            for name, mode in (("private", 0o600), ("open", 0o644)):
                (folder / name).touch()
                (folder / name).chmod(mode)
    finally:
        os.umask(before)
    assert modes(tmp_path / "model") == {"private": 0o640, "open": 0o640}
