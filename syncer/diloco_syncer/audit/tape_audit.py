"""Checks a tape line by line, and sums up what it says was merged.

Theory of operation. Four things must hold of every tape, and each wrong line is named:

* *chain*: a line holds the digest of the line before, and a segment's head says how far each fragment was;
* *versions*: a fragment's versions rise by one with each merge, unless the store lost some or a learner gave one back;
* *weights*: a merge's weights follow from tokens and steps by the settings that were in force, and ages from versions;
* *steps*: no step of a learner's tenure is in two merges of a fragment.

A fragment's merges are kept for as long as a store may lose them (``MOST_UNDONE``): a line ``discarded`` takes them
back, and a version that comes from a learner brings back those up to it which the tape knows. Where it does not know
all of them, the sums of that fragment are of a part of what was merged, and ``unknown`` says so.

What is still wrong with it: a tape whose first segments were deleted is checked from where it begins, without sums.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.merging import push_weights
from diloco_syncer.core.books.shares import Work, weigh_pushes
from diloco_syncer.store import tape as tapes
from diloco_syncer.store.tape import TapeError, decode_line, line_digest, newest_of

CHAIN, VERSIONS, WEIGHTS, STEPS = "chain", "versions", "weights", "steps"
MOST_UNDONE = 512  # merges of a fragment that a line ``discarded`` can take back
_EXACT = 1e-9  # weights are JSON numbers, which are exact; their sum may be made in another order

Key = tuple[int, int]  # slot, tenure


@dataclass(frozen=True, slots=True)
class _Merge:
    """A merge of a fragment, as it is needed to take it back. ``tokens``: by slot; ``before``: how far the steps of
    each learner were before it."""

    version: int
    tokens: Mapping[int, int]
    before: Mapping[Key, int]
    reached: Mapping[Key, int]


@dataclass(slots=True)
class _Fragment:
    """``reached``: the last merged step of each learner; ``merged``: tokens by slot, in versions up to the state's."""

    version: int = 0
    reached: dict[Key, int] = field(default_factory=dict)
    merged: Counter[int] = field(default_factory=Counter)
    done: deque[_Merge] = field(default_factory=lambda: deque(maxlen=MOST_UNDONE))
    undone: dict[int, _Merge] = field(default_factory=dict)
    unknown: bool = False


class TapeAudit:
    """Takes a tape's lines in order. ``versions``: of the state with which ``merged_tokens`` will be compared;
    ``wanted``: (fragment, version) of records whose digests on the tape are asked for.

    ``wrong``: (check, words) of each line that does not hold, in order.
    """

    def __init__(self, versions: Sequence[int] = (), wanted: frozenset[tuple[int, int]] = frozenset()) -> None:
        self._versions = versions
        self._wanted = wanted
        self._fragments: dict[int, _Fragment] = {}
        self._previous: str | None = None
        self._weights: str | None = None  # sync.merge.weights; None: no line has said it
        self._max_steps = 0  # that a learner makes alone
        self._epoch = 0
        self.wrong: list[tuple[str, str]] = []
        self.results: dict[tuple[int, int], str] = {}
        self.lines = 0
        self.merges = 0
        self.segments = 0
        self.taken_back = 0
        self.discarded = 0
        self.events: Counter[str] = Counter()
        self.refused: dict[str, int] = {}
        self.unweighed = 0  # merges whose settings the tape may not have
        self.epochs: tuple[int, int] | None = None
        self.first = 1  # the number of the first line that is there
        self._gap = ""  # what is missing before the next line

    def begin_segment(self, first: int) -> None:
        """The next line is the first of a segment, whose name says that it is the tape's line ``first``."""
        if self.segments == 0:
            self.first, self._previous = first, "" if first == 1 else None
        elif first != self.lines + 1:
            self._forget(first)
        self.lines = first - 1
        self.segments += 1

    def _forget(self, first: int) -> None:
        """What follows is of another piece of the tape: it is judged by itself, and the sums are of a part."""
        missing = f"lines {self.lines + 1} to {first - 1} are missing"
        self._gap = missing if first > self.lines else f"lines {first} to {self.lines} are in two segments"
        self._previous, self._epoch, self._fragments = None, 0, {}
        self.first = max(first, 2)

    def read_line(self, raw: bytes, is_head: bool) -> None:
        """Check the tape's next line. ``is_head``: it is a segment's first."""
        self.lines += 1
        previous, self._previous = self._previous, line_digest(raw)
        try:
            line = decode_line(raw, self.lines)
            if (line["kind"] == tapes.SEGMENT) != is_head:
                self._object(CHAIN, f"a line {line['kind']!r} has no place here")
            elif is_head and "damaged" in line:
                words = f"the segment before it was damaged ({line['damaged']}); a copy is in discarded/"
                self._object(CHAIN, words)
            elif self._gap:
                self._object(CHAIN, self._gap)
            elif previous not in (None, line["previous"]):
                self._object(CHAIN, "it does not follow the line before: a line was changed or left out")
            self._gap = ""
            self._take(line)
        except TapeError as error:
            self.wrong.append((CHAIN, str(error)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            self._object(CHAIN, f"it is not understood: {error!r}")

    def merged_tokens(self, fragment: int) -> Mapping[int, int] | None:
        """Tokens by slot in the fragment's version that the state has. None: not all merges of it are known."""
        of = self._fragments.get(fragment, _Fragment())
        return None if of.unknown else {slot: n for slot, n in of.merged.items() if n}

    def version(self, fragment: int) -> int:
        """The fragment's newest version on the tape."""
        return self._fragments.get(fragment, _Fragment()).version

    # ------------------------------------------------------------- lines

    def _object(self, check: str, words: str) -> None:
        self.wrong.append((check, f"tape line {self.lines}: {words}"))

    def _take(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case tapes.SEGMENT:
                self._take_head(line)
            case tapes.SETTINGS:
                merge = line["sync"]["merge"]
                self._weights = push_weights(str(merge["method"]), str(merge["weights"]))
                self._max_steps = int(line["max_steps"])
                self._take_epoch(int(line["epoch"]))
            case tapes.EVENT:
                self.events[str(line["event"])] += 1
            case tapes.REFUSED:
                self.refused = {str(reason): int(count) for reason, count in line["uploads"].items()}
            case tapes.DISCARDED:
                self._discard(int(line["fragment"]), int(line["version"]))
            case tapes.RECOVERED:
                self._take_epoch(int(line["epoch"]))
                self._recover(line)
            case tapes.MERGE:
                self._take_epoch(int(line["epoch"]))
                self._merge(line)
            case other:
                self._object(CHAIN, f"a line of the kind {other!r} is not known")

    def _take_head(self, line: dict[str, Any]) -> None:
        newest = {fragment: version for fragment, version in newest_of(line).items() if version}
        known = {fragment: of.version for fragment, of in self._fragments.items() if of.version}
        if newest != known and (self.first == 1 or self.lines > self.first) and "damaged" not in line:
            self._object(VERSIONS, f"{known} were the newest versions by fragment, and not {newest}")
        for fragment, version in newest.items():
            of = self._fragments.setdefault(fragment, _Fragment())
            if of.version != version:
                of.version, of.unknown = version, True
                of.done.clear()

    def _take_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            self._object(VERSIONS, f"it was made in epoch {epoch}, after lines of epoch {self._epoch}")
        self._epoch = max(epoch, self._epoch)
        self.epochs = (
            (epoch, epoch) if self.epochs is None else (min(self.epochs[0], epoch), max(self.epochs[1], epoch))
        )

    def _merge(self, line: dict[str, Any]) -> None:
        fragment, version = int(line["fragment"]), int(line["version"])
        of = self._fragments.setdefault(fragment, _Fragment())
        if version != of.version + 1:
            self._object(VERSIONS, f"fragment {fragment} goes from version {of.version} to {version}")
            of.unknown = True
        of.undone.clear()
        self.merges += 1
        pushes = line["responders"]
        self._check_weights(version, pushes, known="late" not in line)
        before, reached, tokens = dict[Key, int](), dict[Key, int](), Counter[int]()
        for push in sorted(pushes, key=lambda push: int(push["first_step"])):
            key = int(push["slot"]), int(push["tenure"])
            first, last = int(push["first_step"]), int(push["last_step"])
            end = reached.get(key, of.reached.get(key, 0))
            if first <= end:
                words = f"steps {first} to {min(last, end)} of slot {key[0]} are in fragment {fragment} already"
                self._object(STEPS, words)
            before.setdefault(key, of.reached.get(key, 0))
            reached[key] = max(end, last)
            tokens[key[0]] += int(push["tokens"])
        self._apply(fragment, of, _Merge(version, tokens, before, reached))
        self._keep_result(fragment, version, line)

    def _apply(self, fragment: int, of: _Fragment, merge: _Merge) -> None:
        of.version = merge.version
        of.reached.update(merge.reached)
        if fragment < len(self._versions) and merge.version <= self._versions[fragment]:
            of.merged.update(merge.tokens)
        of.done.append(merge)

    def _keep_result(self, fragment: int, version: int, line: dict[str, Any]) -> None:
        if (fragment, version) in self._wanted:
            self.results[fragment, version] = str(line["result"])

    def _check_weights(self, version: int, pushes: Sequence[dict[str, Any]], known: bool) -> None:
        """``known``: the settings that were in force are on the tape."""
        for push in pushes:
            if push["age"] != version - 1 - push["oldest_version"]:
                self._object(WEIGHTS, f"slot {push['slot']} has the age {push['age']}, and not as its versions say")
        if self._weights is None or not known:
            self.unweighed += 1
            return
        works = []
        for push in pushes:
            steps = int(push["trained_steps"])
            usual = int(push["trained_tokens"]) / steps if steps else math.inf
            works.append(Work(int(push["tokens"]), int(push["steps"]), int(push["batch"]), usual))
        due = weigh_pushes(self._weights, works, self._max_steps)
        for push, weight in zip(pushes, due, strict=True):
            if not math.isclose(push["weight"], weight, rel_tol=_EXACT, abs_tol=_EXACT):
                words = f"slot {push['slot']} has the weight {push['weight']:.6g}, and {weight:.6g} by tokens and steps"
                self._object(WEIGHTS, words)

    # ------------------------------------------------------------- what a store lost

    def _discard(self, fragment: int, version: int) -> None:
        """The fragment goes on from ``version``: what was merged since is in no version any more."""
        of = self._fragments.setdefault(fragment, _Fragment())
        self.discarded += max(0, of.version - version)
        if version > of.version:
            self._object(VERSIONS, f"fragment {fragment} goes on from version {version}, and had {of.version}")
        of.undone.clear()
        while of.done and of.done[-1].version > version:
            self._undo(fragment, of, of.done.pop())
        of.unknown |= version != (of.done[-1].version if of.done else 0)
        of.version = version

    def _undo(self, fragment: int, of: _Fragment, merge: _Merge) -> None:
        of.reached.update(merge.before)
        if fragment < len(self._versions) and merge.version <= self._versions[fragment]:
            of.merged.subtract(merge.tokens)
        of.undone[merge.version] = merge
        self.results.pop((fragment, merge.version), None)

    def _recover(self, line: dict[str, Any]) -> None:
        """A version that the store had lost came from a learner, with all merges up to it."""
        fragment, version, follows = int(line["fragment"]), int(line["version"]), int(line["follows"])
        of = self._fragments.setdefault(fragment, _Fragment())
        self.taken_back += 1
        if version <= of.version:
            self._object(VERSIONS, f"fragment {fragment} is taken back at version {version}, and had {of.version}")
        if follows != of.version:
            self._object(VERSIONS, f"version {version} of fragment {fragment} follows {follows}, and not {of.version}")
        for lost in range(of.version + 1, version + 1):
            if (merge := of.undone.get(lost)) is None:
                of.unknown = True
                break
            self._apply(fragment, of, merge)
        of.version = version
        of.undone.clear()
        self._keep_result(fragment, version, line)
