"""What both sides measure of a link, and how people see it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from diloco.local.screen import RunView, links_text, picture, slot_note
from diloco_protocol.bandwidth.links import LEAST_TRANSFERS, Measured
from diloco_protocol.documents import SlotRow
from diloco_protocol.wire.records import Link, StepReport
from diloco_syncer.server.links import LinkMeasures, busy_text
from diloco_worker.net.link_probe import LinkProbe
from status_documents import slot_link, slot_row, status_document


def stamped(probe: LinkProbe, now: float, every: float = 1.0) -> StepReport:
    return probe.stamp(StepReport(), now, every)


def test_an_echo_is_asked_for_once_a_heartbeat_and_the_shortest_counts() -> None:
    probe = LinkProbe()
    first = stamped(probe, 10.0)
    assert first.echo and first.link is None
    assert not stamped(probe, 10.5).echo  # one at a time
    probe.record_echo(first.echo, 10.25)
    assert probe.round_trip == pytest.approx(0.25)
    assert not stamped(probe, 10.9).echo  # not before the next heartbeat
    second = stamped(probe, 11.0)
    assert second.echo and second.echo != first.echo
    assert second.link is not None
    assert second.link.round_trip_seconds == pytest.approx(0.25)
    probe.record_echo(second.echo, 11.75)
    assert probe.round_trip == pytest.approx(0.25)
    for n in range(16):  # what is long ago is forgotten
        probe.record_echo(stamped(probe, 20.0 + n).echo, 20.5 + n)
    assert probe.round_trip == pytest.approx(0.5)


def test_echoes_of_others_say_nothing_and_a_lost_one_is_asked_for_again() -> None:
    probe = LinkProbe()
    asked = stamped(probe, 0.0).echo
    probe.record_echo(asked + 1, 0.1)
    probe.record_echo(0, 0.1)
    assert probe.round_trip is None
    assert not stamped(probe, 59.0).echo
    again = stamped(probe, 61.0).echo
    assert again > asked
    probe.record_echo(asked, 61.1)  # the lost one, after all: of no use
    assert probe.round_trip is None
    probe.reset()  # a new session
    assert stamped(probe, 61.2).echo > again
    probe.record_echo(again, 61.3)
    assert probe.round_trip is None


def test_a_report_tells_the_speed_once_enough_was_carried() -> None:
    probe = LinkProbe()
    for n in range(LEAST_TRANSFERS):
        assert stamped(probe, 2.0 * n).link is None
        probe.down.begin(2.0 * n)
        probe.down.end(2.0 * n + 0.5, 1000)
    assert stamped(probe, 99.0).link == Link(down_bytes_per_second=pytest.approx(2000))
    assert probe.measurements() == {"link_up": None, "link_down": pytest.approx(2000), "round_trip_seconds": None}


def test_the_syncer_believes_numbers_that_make_sense() -> None:
    link = LinkMeasures()
    assert link.known == Measured(None, None, None)
    link.apply_report(StepReport(link=Link(5e6, 0.03)))
    assert link.known == Measured(None, 5e6, 0.03)
    link.apply_report(StepReport())  # says nothing of the link: what was known stays
    assert link.known == Measured(None, 5e6, 0.03)
    for number in (float("nan"), float("inf"), -1.0, 1e30):
        link.apply_report(StepReport(link=Link(number, number)))
        assert link.known == Measured(None, None, None)
    for n in range(LEAST_TRANSFERS):
        assert link.known.up is None
        link.up.begin(float(n))
        link.up.end(n + 0.1, 100)
    assert link.known.up == pytest.approx(1000)


def test_a_newcomer_says_how_much_it_lacks_and_how_fast_it_comes() -> None:
    """Before a transfer has ended there is nothing to judge a link by, and yet a person waits."""
    probe, measures = LinkProbe(), LinkMeasures()
    probe.arriving.begin(10.0)
    assert probe.stamp(StepReport(), 11.0, 2.0, missing=24).link == Link(missing_fragments=24)
    probe.arriving.record_bytes(4_500_000, 12.0)
    report = probe.stamp(StepReport(), 15.0, 2.0, missing=22)
    assert report.link == Link(900_000.0, missing_fragments=22)
    measures.apply_report(report)
    assert measures.missing_fragments == 22 and measures.known.down == 900_000.0
    measures.apply_report(probe.stamp(StepReport(), 16.0, 2.0))
    assert measures.missing_fragments == 0


@pytest.mark.promise(
    "A newcomer's download is shown while it goes on: how many fragments it has, and how fast they come"
)
def test_the_picture_shows_what_a_newcomer_has() -> None:
    row = slot_row(1, state="active", link=slot_link(missing_fragments=22, down_bytes_per_second=900_000.0))
    status = status_document(versions=[3] * 24, slots=[row])
    console = Console(width=160)
    with console.capture() as captured:
        console.print(picture(RunView("j", None, status, {}, serving=True), []))
    assert "2 of 24 fragments, 900 kB/s" in captured.get()
    assert slot_note(slot_row(link=slot_link(missing_fragments=24)), 24) == "0 of 24 fragments"


def slot(number: int, **link: Any) -> SlotRow:
    return slot_row(number, region="eu", ordinal=number, state="active", link=slot_link(**link))


def test_the_picture_shows_the_slowest_link_and_why_it_is_slow() -> None:
    status = status_document(
        slots=[
            slot(0, up_bytes_per_second=1e9, down_bytes_per_second=2e9, round_trip_seconds=0.0004),
            slot(1, up_bytes_per_second=1e6, round_trip_seconds=0.08, too_slow=True, message="needs 12 Mbit/s"),
            slot_row(2, region="eu", ordinal=2, state="lost"),
        ]
    )
    assert links_text(status) == "slowest: up 8 Mbit/s, down 16 Gbit/s, round trip 80 ms"
    assert [slot_note(row) for row in status.slots] == ["", "slow link", ""]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(picture(RunView("j", None, status, {}, serving=True), []))
    assert "slow link" in captured.get() and "eu-1: needs 12 Mbit/s" in captured.get()
    assert links_text(status_document(slots=[slot(0)])) == "" == links_text(status_document())


def test_of_a_job_on_one_machine_its_load_is_named_and_no_link() -> None:
    assert busy_text(2.0, 2) == ""
    busy = busy_text(40.2, 2)
    assert "this machine is busy (load 40 on 2 processors)" in busy and "fewer learners" in busy and "link" not in busy
    assert slot_note(slot(0, message=busy)) == "busy machine"
