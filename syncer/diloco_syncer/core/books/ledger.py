"""The ledger of token parts: what became of every trained token in every fragment.

Theory of operation. A token part is one token in one fragment. Per slot and
fragment four columns are kept in integers, each on its own:

    trained  what reports said was trained (the same for all fragments)
    merged   what merges carried, counted here when a merge is durable
    dropped  what will never be merged, by reason: overlap and stale as the
             learner reports them, died and drain as decided here when a
             tenure ends, rolled-back when a store has lost what was merged
    pending  the learner's counters above its base, less what has been merged
             here and the learner has not confirmed yet

A learner's own books obey trained = confirmed + above base + dropped. So the four columns here must obey
trained = merged + pending + dropped: a push merged twice, or steps that vanished, break it. The syncer checks it
at each checkpoint (``imbalances``).

A *tenure* is one process's unbroken use of a slot. While it runs, its reports are cumulative and the newest replaces
the older. When it ends it is folded into the slot's closed columns: what is above the base is dropped, except for a
push that was accepted and not merged yet, which is *held* until it is.

Example. A slot trained 500 tokens. In fragment 0, 300 are merged, and the learner has confirmed 200 of them; it
counts 290 above its base and dropped 10 as overlap. Pending is 290 - (300 - 200) = 190, and 500 = 300 + 190 + 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import Any, NamedTuple

from diloco_protocol.documents import LedgerRow, Tokens
from diloco_protocol.wire import limits
from diloco_protocol.wire.records import FragmentReport, LeaseCursor, PushHeader, StepReport

PushId = tuple[int, int, int, int]
_UNSAVED = ("fragments", "loss", "paused", "link", "echo", "diverged", "ranks")  # of a report; the loss may be NaN
_SAVED = tuple(name for name in StepReport.__dataclass_fields__ if name not in _UNSAVED)
_counts = attrgetter(*FragmentReport.__dataclass_fields__)

_BOOK_FIGURES = ("first_incarnation", "trained", "trained_steps", "compute_seconds", "stalled_seconds")
_CELL_FIGURES = ("merged", "tenure_merged", "compute_seconds")


@dataclass(slots=True)
class Cell:
    """One slot's row for one fragment: closed tenures, and the open one's merged."""

    merged: int = 0  # tokens, all tenures
    tenure_merged: int = 0  # tokens, of the open tenure only
    compute_seconds: float = 0.0  # of merged steps
    dropped: Counter[str] = field(default_factory=Counter)  # closed tenures
    held: dict[PushId, int] = field(default_factory=dict)  # closed tenures' accepted pushes


class Sums(NamedTuple):
    """Over a slot's cells: tokens merged, tokens dropped in closed tenures, compute seconds of merged steps."""

    merged: int
    dropped: int
    compute_seconds: float


class Age(NamedTuple):
    """Sorts a tenure's reports by time: every part only ever rises."""

    trained_steps: int
    decided: int
    bases: int
    dropped: int  # tokens, by the learner; a part of ``decided``


@dataclass(slots=True)
class SlotBook:
    """A slot's books. ``first_incarnation`` 0: no tenure is open. Whoever changes a cell calls ``forget_sums``."""

    fragments: int
    first_incarnation: int = 0
    trained: int = 0  # tokens, closed tenures
    trained_steps: int = 0
    compute_seconds: float = 0.0
    stalled_seconds: float = 0.0
    report: StepReport | None = None  # the open tenure's newest
    cells: list[Cell] = field(default_factory=list)
    # Taken from the above when they are needed; None, or of another report: to be taken anew.
    sums: Sums | None = None
    age: tuple[StepReport, Age] | None = None

    def __post_init__(self) -> None:
        if not self.cells:
            self.cells = [Cell() for _ in range(self.fragments)]

    def forget_sums(self) -> None:
        """Take the sums over the cells anew when they are needed next."""
        self.sums = None

    def take_sums(self) -> Sums:
        if self.sums is None:
            merged = sum(cell.merged for cell in self.cells)
            dropped = sum(sum(cell.dropped.values()) for cell in self.cells)
            self.sums = Sums(merged, dropped, sum(cell.compute_seconds for cell in self.cells))
        return self.sums

    def report_age(self) -> Age:
        """The newest report's. There must be one."""
        assert self.report is not None
        if self.age is None or self.age[0] is not self.report:
            self.age = self.report, _age(self.report)
        return self.age[1]


class Ledger:
    """Books of all slots. Fragment and slot are indices; tokens are integers."""

    def __init__(self, fragments: int, slots: int) -> None:
        self.fragments = fragments
        self.books = [SlotBook(fragments) for _ in range(slots)]

    def add_slots(self, slots: int) -> None:
        """Have at least so many slots; there are never fewer, for a slot's history stays."""
        while len(self.books) < slots:
            self.books.append(SlotBook(self.fragments))

    # ------------------------------------------------------------- events

    def open_tenure(self, slot: int, incarnation: int) -> None:
        """A process took the slot under ``incarnation``; the last tenure must be closed."""
        book = self.books[slot]
        if book.first_incarnation:
            raise ValueError(f"slot {slot} has an open tenure")
        book.first_incarnation = incarnation
        book.report = None

    def apply_report(self, slot: int, report: StepReport) -> bool:
        """Apply a report of the open tenure; True if it is not older than the newest.

        Reports and pushes travel on different connections, so an older one may
        come later; everything in it is cumulative, so it is simply ignored. So is one that was counted in another
        tenure: a learner may have made it before it heard that its slot was given to it anew.
        """
        book = self.books[slot]
        if not book.first_incarnation or len(report.fragments) != self.fragments:
            return False
        if report.tenure not in (0, book.first_incarnation):
            return False
        age = _age(report)
        if book.report is not None and age < book.report_age():
            return False
        book.report, book.age = report, (report, age)
        return True

    def count_merge(self, header: PushHeader) -> None:
        book = self.books[header.slot]
        cell = book.cells[header.fragment]
        cell.merged += header.tokens
        cell.compute_seconds += header.compute_seconds
        if self.of_open_tenure(header):
            cell.tenure_merged += header.tokens
        else:
            held = cell.held.pop(header.id, None)
            if held is None:  # it was written off; the record says that it counted
                cell.dropped["died"] -= header.tokens
                book.forget_sums()
        if book.sums is not None:
            merged, dropped, seconds = book.sums
            book.sums = Sums(merged + header.tokens, dropped, seconds + header.compute_seconds)

    def of_open_tenure(self, header: PushHeader) -> bool:
        first = self.books[header.slot].first_incarnation
        return bool(first) and header.incarnation >= first

    def close_tenure(self, slot: int, reason: str, accepted: Iterable[PushHeader]) -> int:
        """Close the open tenure: drop what is pending for ``reason`` ("died" or "drain"), but hold the slot's
        accepted pushes that are not merged yet. Returns the token parts dropped, over all fragments."""
        book = self.books[slot]
        if not book.first_incarnation:
            return 0
        holding: dict[int, list[PushHeader]] = {}
        for header in accepted:
            if header.slot == slot and self.of_open_tenure(header):
                holding.setdefault(header.fragment, []).append(header)
        dropped = 0
        report = book.report
        for fragment, cell in enumerate(book.cells):
            pending = self.pending_open(slot, fragment)
            if report is not None:
                for name, tokens in _by_reason(report.fragments[fragment]).items():
                    cell.dropped[name] += tokens
            for header in holding.get(fragment, ()):
                cell.held[header.id] = header.tokens
                pending -= header.tokens
            cell.dropped[reason] += pending
            dropped += pending
            cell.tenure_merged = 0
        if report is not None:
            book.trained += report.trained_tokens
            book.trained_steps += report.trained_steps
            book.compute_seconds += report.compute_seconds
            book.stalled_seconds += report.stalled_seconds
        book.first_incarnation = 0
        book.report = None
        book.forget_sums()
        return dropped

    def drop_held(self, header: PushHeader, reason: str) -> int:
        """Drop a held push that no merge can take. Returns its tokens; 0: it is none of those that are held."""
        book = self.books[header.slot]
        cell = book.cells[header.fragment]
        tokens = cell.held.pop(header.id, 0)
        cell.dropped[reason] += tokens
        book.forget_sums()
        return tokens

    def write_off_held(self, keep: set[PushId]) -> list[int]:
        """After a restart, drop held pushes whose bytes are not in the store: they died with their learner. Returns the
        tokens of each slot."""
        dropped = [0] * len(self.books)
        for slot, book in enumerate(self.books):
            for cell in book.cells:
                for push_id in [i for i in cell.held if i not in keep]:
                    cell.dropped["died"] += cell.held[push_id]
                    dropped[slot] += cell.held.pop(push_id)
            book.forget_sums()
        return dropped

    # ------------------------------------------------------------- after a store lost data

    def drop_rolled_back(self, slot: int, epoch: int) -> None:
        """Drop tokens that the slot's learner says are merged, and this ledger does not know: as its base is of
        this ``epoch``, they were in versions that are given up."""
        book = self.books[slot]
        for counts, cell in zip(book.report.fragments if book.report else (), book.cells, strict=False):
            beyond = counts.confirmed_tokens - cell.tenure_merged
            if beyond > 0 and counts.epoch == epoch:
                cell.tenure_merged += beyond
                cell.dropped["rolled-back"] += beyond
                book.forget_sums()

    # ------------------------------------------------------------- columns

    def trained(self, slot: int) -> int:
        """Tokens the slot trained, over all its tenures."""
        book = self.books[slot]
        return book.trained + (book.report.trained_tokens if book.report else 0)

    def pending_open(self, slot: int, fragment: int) -> int:
        """Token parts above the base in the open tenure and not merged."""
        book = self.books[slot]
        if book.report is None:
            return 0
        counts = book.report.fragments[fragment]
        return counts.tokens - (book.cells[fragment].tenure_merged - counts.confirmed_tokens)

    def pending(self, slot: int, fragment: int) -> int:
        return self.pending_open(slot, fragment) + sum(self.books[slot].cells[fragment].held.values())

    def merged(self, slot: int, fragment: int) -> int:
        return self.books[slot].cells[fragment].merged

    def dropped(self, slot: int, fragment: int) -> dict[str, int]:
        """Token parts dropped, by reason; zero reasons are left out."""
        book = self.books[slot]
        result = Counter(book.cells[fragment].dropped)
        if book.report is not None:
            for name, tokens in _by_reason(book.report.fragments[fragment]).items():
                result[name] += tokens
        return {name: tokens for name, tokens in sorted(result.items()) if tokens}

    def total_trained(self) -> int:
        """Tokens trained by all slots, at most what a message can say."""
        return min(limits.MAX_COUNT, sum(self.trained(slot) for slot in range(len(self.books))))

    def rows(self) -> list[LedgerRow]:
        """One row per fragment, over all slots (report.json ``ledger``); tokens. A row that is not exact says so, and
        none of its figures is below 0: a fault of the books hides no other row."""
        slots = range(len(self.books))
        rows: list[LedgerRow] = []
        for fragment in range(self.fragments):
            reasons: Counter[str] = Counter()
            for slot in slots:
                reasons.update(self.dropped(slot, fragment))
            rows.append(
                LedgerRow(
                    fragment=fragment,
                    merged=max(0, sum(self.merged(slot, fragment) for slot in slots)),
                    pending=max(0, sum(self.pending(slot, fragment) for slot in slots)),
                    dropped=max(0, sum(reasons.values())),
                    reasons={name: tokens for name, tokens in sorted(reasons.items()) if tokens},
                    imbalance=next(filter(None, (self._imbalance(slot, fragment) for slot in slots)), ""),
                )
            )
        return rows

    def totals(self) -> Tokens:
        """Whole tokens: dropped rounded down, merged too, the rest pending. Where no part of any token is pending, what
        rounding leaves is merged: else a job that has lost nothing would seem to wait for a token."""
        trained = self.total_trained()
        parts = max(1, self.fragments)
        merged = sum(book.take_sums().merged for book in self.books)
        dropped = sum(book.take_sums().dropped for book in self.books)
        dropped += sum(book.report_age().dropped for book in self.books if book.report is not None)
        none_pending = merged + dropped == trained * parts
        dropped //= parts
        merged = trained - dropped if none_pending else merged // parts
        merged, pending, dropped = (max(0, tokens) for tokens in (merged, trained - merged - dropped, dropped))
        return Tokens(trained=trained, merged=merged, pending=pending, dropped=dropped)

    def imbalances(self, slot: int) -> list[str]:
        """Say in words in which fragments the slot's columns do not add up; empty: they are exact."""
        return [words for fragment in range(self.fragments) if (words := self._imbalance(slot, fragment))]

    def _imbalance(self, slot: int, fragment: int) -> str:
        """How one slot's columns of one fragment do not add up, in words; empty: they are exact."""
        trained, merged, pending = self.trained(slot), self.merged(slot, fragment), self.pending(slot, fragment)
        dropped = self.dropped(slot, fragment)
        exact = trained == merged + pending + sum(dropped.values())
        if exact and min([merged, pending, *dropped.values()]) >= 0:
            return ""
        return (
            f"slot {slot} fragment {fragment}: trained {trained}, merged {merged}, pending {pending}, dropped {dropped}"
        )

    def merged_compute_seconds(self) -> float:
        """Compute seconds of merged steps, summed over slots and fragments (goodput's numerator)."""
        return sum(book.take_sums().compute_seconds for book in self.books)

    def seconds_of_a_slot(self) -> float:
        """Compute seconds of one slot's merged steps: of that with the second most, so that no learner alone can make
        them many."""
        known = (book.take_sums().compute_seconds / self.fragments for book in self.books)
        return nlargest(2, [seconds for seconds in known if seconds > 0] or [0.0])[-1]

    def steps(self, slot: int) -> int:
        book = self.books[slot]
        return book.trained_steps + (book.report.trained_steps if book.report else 0)

    def compute_seconds(self, slot: int) -> float:
        book = self.books[slot]
        return book.compute_seconds + (book.report.compute_seconds if book.report else 0.0)

    def stalled_seconds(self, slot: int) -> float:
        book = self.books[slot]
        return book.stalled_seconds + (book.report.stalled_seconds if book.report else 0.0)

    # ------------------------------------------------------------- durable

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                **{name: getattr(book, name) for name in _BOOK_FIGURES},
                "report": None if book.report is None else report_to_json(book.report),
                "cells": [
                    {
                        **{name: getattr(cell, name) for name in _CELL_FIGURES},
                        "dropped": dict(cell.dropped),
                        "held": [[*push_id, tokens] for push_id, tokens in cell.held.items()],
                    }
                    for cell in book.cells
                ],
            }
            for book in self.books
        ]

    @classmethod
    def from_json(cls, fragments: int, rows: list[dict[str, Any]]) -> Ledger:
        ledger = cls(fragments, len(rows))
        for book, row in zip(ledger.books, rows, strict=True):
            for name in _BOOK_FIGURES:
                setattr(book, name, row[name])
            book.report = None if row["report"] is None else report_from_json(row["report"])
            for cell, saved in zip(book.cells, row["cells"], strict=True):
                for name in _CELL_FIGURES:
                    setattr(cell, name, saved[name])
                cell.dropped = Counter(saved["dropped"])
                cell.held = {(a, b, c, d): tokens for a, b, c, d, tokens in saved["held"]}
        return ledger


def _age(report: StepReport) -> Age:
    dropped = sum(f.dropped_overlap + f.dropped_stale for f in report.fragments)
    decided = dropped + sum(f.confirmed_tokens for f in report.fragments)
    bases = sum(f.epoch + f.base_version for f in report.fragments)
    return Age(report.trained_steps, decided, bases, dropped)


def _by_reason(counts: FragmentReport) -> dict[str, int]:
    return {"overlap": counts.dropped_overlap, "stale": counts.dropped_stale}


def report_to_json(report: StepReport) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(report, name) for name in _SAVED}
    return row | {"fragments": [_counts(fragment) for fragment in report.fragments]}


def report_from_json(row: dict[str, Any]) -> StepReport:
    fragments = tuple(FragmentReport(*values) for values in row["fragments"])
    cursors = tuple(LeaseCursor(*cursor) for cursor in row["cursors"])
    return StepReport(**{**row, "fragments": fragments, "cursors": cursors})


def header_to_json(header: PushHeader) -> dict[str, Any]:
    """JSON form of a push header (merge records, spooled offers)."""
    row = {name: getattr(header, name) for name in PushHeader.__dataclass_fields__ if name != "report"}
    return {**row, "report": report_to_json(header.report)}


def header_from_json(row: dict[str, Any]) -> PushHeader:
    return PushHeader(**{**row, "report": report_from_json(row["report"])})
