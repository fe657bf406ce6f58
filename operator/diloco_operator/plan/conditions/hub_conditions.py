"""LinksTooSlow, RoundOverdue and SpecDrift in the hub, of learners in all clusters.

**LinksTooSlow.** The syncer judges each link whenever it is asked (``diloco_protocol.bandwidth``),
and a link near its need is too slow at one time and not at another. So the condition becomes True when a link has been
too slow for ``TOO_SLOW_SECONDS`` without a break. It becomes False when no link has been too slow for ``WELL_SECONDS``.

Until then the message keeps what it says of a region, since fresh numbers would change it all the
time; another region whose link is too slow is added. The message in the status is the memory of
this, because it survives a restart of the operator.

**SpecDrift.** The syncer's status names every learner that it refused because its copy of the job
is another, until a learner of that place is let in. A refusal older than ``RECENT_SECONDS`` is
left out: that learner comes no more.
"""

from __future__ import annotations

from diloco_operator.job import Job
from diloco_operator.model import Fact
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.pod_status import list_names
from diloco_operator.plan.view import View
from diloco_protocol.common.format_units import bits_text, seconds_text
from diloco_protocol.documents import SlotLink, SlotRow, StatusDocument
from diloco_protocol.vocabulary import JoinRefusal

TOO_SLOW_SECONDS, WELL_SECONDS = 45.0, 180.0
RECENT_SECONDS = 900.0
"""A refusal younger than this is in force: a refused learner is started again at least every five minutes."""
DETAILED = 8
"""The message has the numbers of at most so many regions."""
_NUMBERS = " (learner "
_CURE = (
    " Merges come later or more rarely; training continues. Fix: a smaller sync.compression, a larger "
    "sync.every or sync.overlap, or a faster link; diloco plan prints what is needed."
)


def decide_hub_conditions(view: View, stage: tuple[str, str] | None, out: ConditionSet) -> None:
    """Decide all three. ``stage``: why no learner shall be connected now, reason and message; None: learners shall."""
    for kind, decide in (
        ("LinksTooSlow", _decide_links_too_slow),
        ("RoundOverdue", _decide_round_overdue),
        ("SpecDrift", _decide_spec_drift),
    ):
        if stage is not None:
            out.set(kind, False, *stage)
        elif view.document is not None:
            decide(view, view.document, out)
        else:
            out.keep_or_unknown(kind, "SyncerNotReady", "Not known: the syncer cannot be asked.")


# ------------------------------------------------------------------ links


def _decide_links_too_slow(view: View, document: StatusDocument, out: ConditionSet) -> None:
    slots = [slot for slot in document.slots if slot.link is not None]
    slow = {_subject(slot): slot for slot in slots if slot.link is not None and slot.link.too_slow}
    lasting = [
        slot
        for slot in slots
        if view.observe(Fact.LINK_TOO_SLOW, _subject(slot), holds=_subject(slot) in slow) >= TOO_SLOW_SECONDS
    ]
    view.memory.timers.keep(Fact.LINK_TOO_SLOW, {_subject(slot) for slot in slots})
    well = view.observe(Fact.LINKS_FAST_ENOUGH, holds=not slow)
    before = view.condition("LinksTooSlow")
    known = str(before.get("message")) if before.get("status") == "True" else ""
    regions = sorted({slot.region for slot in lasting})
    fresh = [region for region in regions if f"Region {region} " not in known]
    if fresh:
        out.set("LinksTooSlow", True, "SlowerThanNeeded", _extend_message(known, fresh, lasting))
    elif known and well < WELL_SECONDS:
        out.keep("LinksTooSlow")
    else:
        out.set("LinksTooSlow", False, "FastEnough", "")


def _subject(slot: SlotRow) -> str:
    return f"{slot.region}-{slot.ordinal}"


def _extend_message(before: str, regions: list[str], slots: list[SlotRow]) -> str:
    """The message so far, with these regions added. ``slots``: those with links that are too slow."""
    said = before.removesuffix(_CURE)
    parts = [said] if said else []
    detailed = max(0, DETAILED - said.count(_NUMBERS))
    for region in regions[:detailed]:
        worst = min((s for s in slots if s.region == region), key=lambda s: (_share(s.link), s.ordinal))
        assert worst.link is not None
        parts.append(f"Region {region}{_NUMBERS}{worst.ordinal}): {_numbers(worst.link)}.")
    parts += [f"Region {region} too." for region in regions[detailed:]]
    return " ".join(parts) + _CURE


def _share(link: SlotLink | None) -> float:
    """The rate as a share of what is needed, in the worse direction; 1 where it is not known."""
    pairs = [(there, need) for _, there, need in _ways(link)] if link is not None else []
    return min((there / need for there, need in pairs if there and need), default=1.0)


def _ways(link: SlotLink) -> tuple[tuple[str, float | None, float | None], ...]:
    """Each direction with its rate and what it needs, bytes per second."""
    return (
        ("up", link.up_bytes_per_second, link.needs_up_bytes_per_second),
        ("down", link.down_bytes_per_second, link.needs_down_bytes_per_second),
    )


def _numbers(link: SlotLink) -> str:
    parts = []
    for name, there, need in _ways(link):
        if there:
            parts.append(f"{name} {_rate(there)}{f' of {_rate(need)} needed' if need else ''}")
    if link.round_trip_seconds:
        parts.append(f"round trip {seconds_text(_rounded(link.round_trip_seconds))}")
    return ", ".join(parts) or "slower than needed"


def _rate(bytes_per_second: float) -> str:
    return bits_text(_rounded(8 * bytes_per_second))


def _rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


# ------------------------------------------------------------------ rounds


def _decide_round_overdue(view: View, document: StatusDocument, out: ConditionSet) -> None:
    said = "; ".join([row.message for row in document.rounds if row.overdue][:DETAILED])
    message = f"Merges wait; learners continue alone: {said}. The syncer keeps asking the learners."
    out.set_fault("RoundOverdue", "PushesMissing", message if said else "", over="RoundsClose")


# ------------------------------------------------------------------ other jobs


def _decide_spec_drift(view: View, document: StatusDocument, out: ConditionSet) -> None:
    fields: dict[str, set[str]] = {}
    for refusal in document.refusals:
        if refusal.reason == JoinRefusal.SPEC_DRIFT and refusal.seconds_ago < RECENT_SECONDS:
            fields.setdefault(_name_party(view.job, refusal.role, refusal.region), set()).update(refusal.fields)
    said = "; ".join(f"{party}: {list_names(sorted(found))}" for party, found in sorted(fields.items()))
    message = (
        f"Refused, because these fields differ from this copy of the job: {said}. These learners stay out of "
        "the quorum until you delete their cluster's copy and apply this job there."
    )
    out.set_fault("SpecDrift", "FieldsDiffer", message if fields else "", over="SameJob")


def _name_party(job: Job, role: str, region: str) -> str:
    if role == "evaluator":
        return "the evaluator"
    cluster = next((r.cluster for r in job.spec.regions if r.name == region), None)
    return f"region {region}" + (f" (cluster {cluster})" if cluster else "")
