"""``diloco status --watch`` of a run on this machine or of an address: the run's own screen, from outside of it."""

from __future__ import annotations

import json
import time

from diloco.console import COMPLETE, FAILED, CommandError, print_text
from diloco.local.screen import Screen, make_screen, outside_view
from diloco.local.status import UnansweredRun, ended_words, read_status
from diloco.local.status import as_json as json_of
from diloco.local.summary import summary
from diloco.local.watch import show_event
from diloco.text_console import TextConsole
from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase

POLL_SECONDS = 1.0
UNANSWERED_SECONDS = 60.0  # of a syncer that is starting, perhaps again


def watch_status(where: str | None, as_json: bool, to_its_end: bool = False) -> int:
    """Show how the run is doing until it is over; the exit code: 0, or 1 if it has failed. Raises CommandError, also
    when a run that was shown does not answer any more and has left no report. ``to_its_end``: who asks waits for the
    run, and shows what it has left."""
    screen = None if as_json else make_screen()
    shown: set[tuple[int, int]] = set()
    began, looking_since, heard, view = time.time(), time.monotonic(), float("-inf"), None
    try:
        while True:
            try:
                document = read_status(where)
                if isinstance(document, Report) and document.outcome == "running":  # its syncer is away, for now
                    raise UnansweredRun(f"{ended_words(document)}: {document.message}")
            except CommandError as error:
                late = time.monotonic() > max(heard, looking_since) + UNANSWERED_SECONDS
                if late or (view is None and not isinstance(error, UnansweredRun)):
                    raise
                if view is not None:
                    view.serving = False
                    if screen is not None:
                        screen.update(view)
                time.sleep(POLL_SECONDS)
                continue
            if screen is None:
                print_text(json.dumps(json_of(document)), flush=True)
            if isinstance(document, Report):
                break
            heard = time.monotonic()
            view = outside_view(document)
            if screen is not None:
                _show_events(screen, document, shown, began)
                screen.update(view)
            if document.phase in ENDED_PHASES:
                return FAILED if document.phase == JobPhase.FAILED else COMPLETE
            time.sleep(POLL_SECONDS)
    finally:
        if screen is not None:
            screen.close()
    if screen is not None and not to_its_end:
        console = TextConsole()
        console.print(f"{ended_words(document)}:")
        console.print(summary(document))
    return FAILED if document.outcome in ("failed", "killed") else COMPLETE


def _show_events(screen: Screen, document: StatusDocument, shown: set[tuple[int, int]], began: float) -> None:
    """What has happened since the last look, or since the watch began."""
    for event in document.events:
        key = (document.epoch, event.n)
        if key in shown:
            continue
        shown.add(key)
        if event.time >= began - 1.0:
            show_event(screen, event)
