"""How long a version counts as being downloaded."""

from __future__ import annotations

import pytest

from diloco_syncer.runtime import active_downloads
from diloco_syncer.runtime.active_downloads import IDLE_SECONDS, ActiveDownloads


def test_a_download_is_active_from_its_first_part_until_all_of_it_was_sent() -> None:
    made = ActiveDownloads()
    made.begin_part(0, 1, "slow", 100, 0.0)
    assert made.is_active(0, 1, 10 * IDLE_SECONDS) and not made.is_active(0, 2, 0.0), "a part is being sent"
    assert not made.end_part(0, 1, "slow", (0, 60), 50.0)
    assert made.last_touched(0, 1) == 50.0 and made.last_touched(0, 2) == 0.0
    assert made.is_active(0, 1, 50.0 + IDLE_SECONDS) and not made.is_active(0, 1, 50.1 + IDLE_SECONDS)
    made.begin_part(0, 1, "slow", 100, 51.0)
    assert made.end_part(0, 1, "slow", (60, 100), 52.0)
    assert len(made) == 0 and not made.is_active(0, 1, 52.0)


def test_a_part_that_broke_is_none_and_the_last_call_ends_the_download() -> None:
    made = ActiveDownloads()
    for _ in range(3):
        made.begin_part(0, 1, "slow", 100, 0.0)
    assert len(made) == 1
    assert not made.end_part(0, 1, "slow", (0, 0), 1.0)
    assert not made.end_part(0, 1, "slow", (0, 100), 2.0), "another call still sends"
    assert made.end_part(0, 1, "slow", (50, 50), 3.0)
    assert not made.end_part(0, 1, "slow", (0, 100), 4.0), "nobody's"


def test_a_part_that_goes_on_where_it_broke_is_counted_by_its_bytes() -> None:
    """Some bytes are sent twice: those that were under way when the connection broke."""
    made = ActiveDownloads()
    for sent in ((0, 40), (70, 100), (30, 69)):
        made.begin_part(0, 1, "slow", 100, 0.0)
        assert not made.end_part(0, 1, "slow", sent, 1.0)
    made.begin_part(0, 1, "slow", 100, 0.0)
    assert made.end_part(0, 1, "slow", (69, 70), 2.0)


def test_what_is_idle_is_dropped_and_what_is_not_kept() -> None:
    made = ActiveDownloads()
    for version, reader in ((1, "runs"), (1, "idle"), (2, "runs")):
        made.begin_part(0, version, reader, 100, 0.0)
    made.end_part(0, 1, "idle", (0, 10), 0.0)
    made.drop_idle(IDLE_SECONDS, {(0, 1), (0, 2)})
    assert len(made) == 3
    made.drop_idle(IDLE_SECONDS + 0.1, {(0, 1), (0, 2)})
    assert len(made) == 2
    made.drop_idle(IDLE_SECONDS + 0.1, {(0, 1)})
    assert len(made) == 1 and made.is_active(0, 1, 0.0)


def test_of_too_many_the_one_that_was_idle_longest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_downloads, "MAX_DOWNLOADS", 3)
    made = ActiveDownloads()
    for at, reader in enumerate(("runs", "idle", "idle later")):
        made.begin_part(0, 1, reader, 100, float(at))
    for reader in ("idle", "idle later"):
        made.end_part(0, 1, reader, (0, 10), 5.0 + len(reader))
    made.begin_part(0, 2, "new", 100, 90.0)
    assert len(made) == 3 and made.is_active(0, 2, 90.0)
    assert not made.end_part(0, 1, "idle", (10, 100), 91.0), "it is forgotten"
    assert made.end_part(0, 1, "runs", (0, 100), 91.0)
