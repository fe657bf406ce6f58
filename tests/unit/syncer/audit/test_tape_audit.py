"""What an audit says of a tape: each line that does not hold, by the check that it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_syncer.audit.tape_audit import CHAIN, MOST_UNDONE, STEPS, VERSIONS, WEIGHTS, TapeAudit
from diloco_syncer.store import tape as tapes
from diloco_syncer.store.tape import line_digest

Line = dict[str, Any]
MERGE = {"method": "auto", "weights": "tokens-quality"}
SETTINGS: Line = {"kind": tapes.SETTINGS, "epoch": 1, "max_steps": 96, "sync": {"merge": MERGE}}


def push(slot: int, version: int, *, tenure: int = 1, steps: int = 4, tokens: int = 100, weight: float = 0.5) -> Line:
    """A push of ``steps`` steps, the slot's newest before version ``version``."""
    last = version * steps
    return {
        **{"slot": slot, "incarnation": tenure, "tenure": tenure, "sequence": version, "base_epoch": 1},
        **{"base_version": version - 1, "oldest_version": version - 1, "age": 0, "offer": False, "norm": 1.0},
        **{
            "first_step": last - steps + 1,
            "last_step": last,
            "steps": steps,
            "tokens": tokens,
            "trained_steps": 0,
            "trained_tokens": 0,
            "weight": weight,
            "batch": 1,
        },
    }


def merge(version: int, *pushes: Line, fragment: int = 0, epoch: int = 1) -> Line:
    return {
        **{"kind": tapes.MERGE, "fragment": fragment, "version": version, "epoch": epoch, "result": f"v{version}"},
        "responders": list(pushes or (push(0, version), push(1, version))),
    }


def discarded(version: int, fragment: int = 0) -> Line:
    return {"kind": tapes.DISCARDED, "fragment": fragment, "version": version, "epoch": 2, "reason": "lost"}


def recovered(version: int, follows: int, fragment: int = 0) -> Line:
    return {
        **{"kind": tapes.RECOVERED, "fragment": fragment, "version": version, "epoch": 2, "follows": follows},
        **{"held_epoch": 1, "result": f"v{version}"},
    }


def chained(lines: list[Line], previous: str = "") -> list[bytes]:
    """The lines as a tape has them, each with the digest of the one before."""
    made = []
    for line in lines:
        made.append(json.dumps({"format": 2, "time": 1.5e9, **line, "previous": previous}).encode() + b"\n")
        previous = line_digest(made[-1])
    return made


def head(**newest: int) -> Line:
    return {"kind": tapes.SEGMENT, "newest": {name.removeprefix("f"): version for name, version in newest.items()}}


def audited(lines: list[bytes], audit: TapeAudit | None = None, first: int = 1) -> TapeAudit:
    audit = audit or TapeAudit([9, 9])
    audit.begin_segment(first)
    for place, raw in enumerate(lines):
        audit.read_line(raw, place == 0)
    return audit


def audit_of(*lines: Line) -> TapeAudit:
    return audited(chained([head(), SETTINGS, *lines]))


def checks(audit: TapeAudit) -> list[str]:
    return [check for check, _ in audit.wrong]


@pytest.mark.promise("`diloco audit` names each line of a tape that was changed, left out or added")
def test_a_whole_tape_holds_and_is_summed_up() -> None:
    audit = audit_of(*(merge(version) for version in (1, 2, 3)), merge(1, push(1, 1, weight=1.0), fragment=1))
    assert audit.wrong == [] and (audit.merges, audit.lines, audit.epochs) == (4, 6, (1, 1))
    assert audit.merged_tokens(0) == {0: 300, 1: 300} and audit.merged_tokens(1) == {1: 100}


@pytest.mark.promise("`diloco audit` names each line of a tape that was changed, left out or added")
def test_a_line_that_was_changed_or_left_out_breaks_the_chain() -> None:
    lines = chained([head(), SETTINGS, *(merge(version) for version in (1, 2, 3))])
    changed = lines[2].replace(b'"tokens": 100', b'"tokens": 101', 1)
    assert audited([*lines[:2], changed, *lines[3:]]).wrong[-1] == (
        CHAIN,
        "tape line 4: it does not follow the line before: a line was changed or left out",
    )
    assert checks(audited([*lines[:3], *lines[4:]])) == [CHAIN, VERSIONS]
    assert checks(audited([*lines, lines[2]])) == [CHAIN, VERSIONS, STEPS, STEPS]
    assert checks(audited([lines[0], b"no JSON\n", *lines[2:]]))[0] == CHAIN
    assert checks(audited(lines[1:]))[0] == CHAIN, "a segment begins with its head"
    assert audited(chained([head(), {"kind": "other", "fragment": 0, "version": 1}])).wrong == [
        (CHAIN, "tape line 2: a line of the kind 'other' is not known")
    ]
    assert checks(audited(chained([head(), {"kind": tapes.MERGE, "fragment": 0, "version": 1}]))) == [CHAIN]


def test_segments_follow_each_other() -> None:
    first = chained([head(), SETTINGS, merge(1)])
    second = chained([head(f0=1), merge(2)], line_digest(first[-1]))
    assert audited(second, audited(first), first=4).wrong == []
    assert audited(second, audited(first), first=9).wrong == [(CHAIN, "tape line 9: lines 4 to 8 are missing")]
    assert audited(second, audited(first), first=3).wrong == [(CHAIN, "tape line 3: lines 3 to 3 are in two segments")]
    other = chained([head(f0=3), merge(4)], line_digest(first[-1]))
    assert audited(other, audited(first), first=4).wrong == [
        (VERSIONS, "tape line 4: {0: 1} were the newest versions by fragment, and not {0: 3}")
    ]
    damaged = chained([{**head(f0=3), "damaged": "torn"}, merge(4)])
    assert audited(damaged, audited(first), first=9).wrong == [
        (CHAIN, "tape line 9: the segment before it was damaged (torn); a copy is in discarded/")
    ]


def test_a_tape_without_its_first_segments_is_checked_from_where_it_begins() -> None:
    audit = audited(chained([head(f0=6), SETTINGS, merge(7)], "abc"), first=40)
    assert audit.wrong == [] and audit.first == 40
    assert audit.merged_tokens(0) is None


@pytest.mark.promise("`diloco audit` recomputes each merge's weights and ages")
def test_weights_and_ages_are_computed_again() -> None:
    unequal = merge(1, push(0, 1, tokens=300, weight=0.9), push(1, 1, tokens=100, weight=0.1))
    assert audit_of(unequal).wrong == [], "tokens times tokens per step: 9 to 1"
    heavy = merge(1, push(0, 1, tokens=300, weight=0.75), push(1, 1, tokens=100, weight=0.25))
    assert [why for _, why in audit_of(heavy).wrong] == [
        "tape line 3: slot 0 has the weight 0.75, and 0.9 by tokens and steps",
        "tape line 3: slot 1 has the weight 0.25, and 0.1 by tokens and steps",
    ]
    most = merge(1, push(0, 1, tokens=9000, weight=16 / 17), push(1, 1, tokens=100, weight=1 / 17))
    assert audit_of(most).wrong == [], "at most four times the tokens per step of the other"
    mine = {**push(0, 1, tokens=200), "trained_steps": 80, "trained_tokens": 1000}
    own = merge(1, mine, push(1, 1, tokens=200))
    assert checks(audit_of(own)) == [], "50 tokens a step are four times the learner's own mean"
    own["responders"][0]["trained_tokens"] = 500
    assert checks(audit_of(own)) == [WEIGHTS, WEIGHTS], "and more than that of 6.25"
    median = {**SETTINGS, "sync": {"merge": {**MERGE, "method": "median"}}}
    assert audit_of(median, merge(1, push(0, 1, tokens=9), push(1, 1))).wrong == [], "each counts as much"
    uniform = {**SETTINGS, "sync": {"merge": {**MERGE, "weights": "uniform"}}}
    assert audit_of(uniform, merge(1, push(0, 1, tokens=9), push(1, 1))).wrong == []
    assert audited(chained([head(), heavy])).wrong == [], "without settings nobody knows"
    assert audited(chained([head(), heavy])).unweighed == 1
    late = audit_of({**heavy, "late": True})
    assert (late.wrong, late.unweighed) == ([], 1), "a crash may have taken the settings of its life"
    assert checks(audit_of(merge(1, {**push(0, 1, weight=1.0), "age": 2}))) == [WEIGHTS]


@pytest.mark.promise("`diloco audit` finds a step that is in two merges of a fragment")
def test_no_step_of_a_tenure_is_in_two_merges_of_a_fragment() -> None:
    twice = merge(2, {**push(0, 2, weight=1.0), "first_step": 4})
    assert audit_of(merge(1), twice).wrong == [(STEPS, "tape line 4: steps 4 to 4 of slot 0 are in fragment 0 already")]
    both = merge(1, push(0, 1), push(0, 1))
    assert checks(audit_of(both)) == [STEPS], "nor in two pushes of one merge"
    assert audit_of(merge(1), merge(1, push(0, 1, weight=1.0), fragment=1)).wrong == [], "another fragment"
    newcomer = merge(2, {**push(0, 1, tenure=5, weight=1.0), "oldest_version": 1})
    assert audit_of(merge(1), newcomer).wrong == [], "another process counts anew"


def test_versions_rise_by_one_and_epochs_never_fall() -> None:
    assert audit_of(merge(1), merge(3)).wrong == [(VERSIONS, "tape line 4: fragment 0 goes from version 1 to 3")]
    assert audit_of(merge(1), merge(3)).merged_tokens(0) is None
    assert audit_of(merge(1, epoch=2), merge(2)).wrong == [
        (VERSIONS, "tape line 4: it was made in epoch 1, after lines of epoch 2")
    ]


@pytest.mark.promise("An audit follows what a store lost and what learners gave back, to the token")
def test_what_was_lost_is_taken_back_and_what_learners_held_comes_again() -> None:
    lost = [merge(1), merge(2), merge(3), discarded(1)]
    audit = audit_of(*lost, merge(2, epoch=2))
    assert audit.wrong == [] and audit.discarded == 2, "the same steps may be merged again"
    assert audit.merged_tokens(0) == {0: 200, 1: 200}
    audit = audit_of(*lost, recovered(3, follows=1))
    assert audit.wrong == [] and audit.merged_tokens(0) == {0: 300, 1: 300}
    again = audit_of(*lost, recovered(3, follows=1), merge(4, {**push(0, 3, weight=1.0), "oldest_version": 3}, epoch=2))
    assert checks(again) == [STEPS], "what came back with the version is in it"
    beyond = audit_of(merge(1), recovered(5, follows=1), merge(6, epoch=2))
    assert beyond.wrong == [] and beyond.merged_tokens(0) is None
    assert checks(audit_of(merge(1), recovered(1, follows=0))) == [VERSIONS, VERSIONS]
    assert checks(audit_of(merge(1), discarded(2))) == [VERSIONS]


def test_a_long_tape_keeps_what_a_store_may_lose_and_no_more() -> None:
    last = MOST_UNDONE + 5
    lines = [merge(version) for version in range(1, last + 1)]
    audit = audited(chained([head(), SETTINGS, *lines, discarded(last - 1)]), TapeAudit([last]))
    assert audit.wrong == [] and audit.merged_tokens(0) == {0: 100 * (last - 1), 1: 100 * (last - 1)}
    assert audit_of(*lines, discarded(1)).merged_tokens(0) is None


def test_sums_are_of_the_versions_that_are_asked_for_and_results_of_the_records() -> None:
    lines = chained([head(), SETTINGS, *(merge(version) for version in (1, 2, 3))])
    audit = audited(lines, TapeAudit([2], frozenset({(0, 2), (0, 9)})))
    assert audit.merged_tokens(0) == {0: 200, 1: 200} and audit.results == {(0, 2): "v2"}


def test_events_and_refusals_are_counted() -> None:
    events = [{"kind": tapes.EVENT, "event": kind, "slot": 0, "message": ""} for kind in ("joined", "lost", "joined")]
    refused = [{"kind": tapes.REFUSED, "uploads": {"stale": count}} for count in (1, 4)]
    audit = audit_of(*events, *refused)
    assert (audit.wrong, audit.events, audit.refused) == ([], {"joined": 2, "lost": 1}, {"stale": 4})
