"""What the hub tells of learners wherever they are: thin links, and whose copy of the job is another.

Theory of operation. The syncer judges each link by what it carries (protocol's links.py), anew
whenever it is asked; a link near its need is thin at one time and not at another. So it is told
when one has been thin for ``THIN_SECONDS`` without a break, and it is over when none has been
for ``WELL_SECONDS``. Meanwhile what was told of a region stands (its numbers would change all
the time), and another region whose link is thin too is added.

Whom the syncer has refused because its job is another is in its status until somebody of
that place is let in; who comes no more is forgotten after ``LATELY``.
"""

from __future__ import annotations

from diloco_operator.job import Job
from diloco_operator.plan.conditions.conditions import Conditions, listed
from diloco_operator.plan.view import Link, Slot, View
from diloco_protocol.common.format_units import bits_text, seconds_text
from diloco_protocol.vocabulary import JoinRefusal

THIN_SECONDS, WELL_SECONDS = 45.0, 180.0
LATELY = 900.0
"""Seconds: a learner that ends by its refusal is started again at least every five minutes."""
DETAILED = 8
"""Of so many regions the numbers are told."""
_NUMBERS = " (learner "
_CURE = (
    " Merges come later or more rarely; training goes on. Cure: a smaller sync.compression, a larger "
    "sync.every or sync.overlap, or a faster link; diloco plan says what is needed."
)


def judge(view: View, stage: tuple[str, str] | None, out: Conditions) -> None:
    """``stage``: reason and message of why nobody is to be connected now; None: learners are."""
    for kind, decide in (("LinksTooSlow", _too_slow), ("SpecDrift", _drift)):
        before = view.condition(kind)
        if stage is not None:
            out.say(kind, False, *stage)
        elif view.document is not None:
            decide(view, out)
        elif before:  # nobody knows: what was last known stands
            out.say(kind, before["status"], str(before.get("reason")), str(before.get("message")))
        else:
            out.say(kind, "Unknown", "SyncerNotReady", "The syncer, which knows, cannot be asked.")


# ------------------------------------------------------------------ links


def _too_slow(view: View, out: Conditions) -> None:
    slots = [slot for slot in view.slots if slot.link is not None]
    lasting = [slot for slot in slots if view.lasting(_fact(slot), _is_thin(slot)) >= THIN_SECONDS]
    facts = {_fact(slot) for slot in slots}
    for fact in [f for f in view.memory.since if f.startswith("thin ") and f not in facts]:
        del view.memory.since[fact]
    well = view.lasting("links are well", not any(map(_is_thin, slots)))
    before = view.condition("LinksTooSlow")
    told = str(before.get("message")) if before.get("status") == "True" else ""
    regions = sorted({slot.region for slot in lasting})
    fresh = [region for region in regions if f"Region {region} " not in told]
    if fresh:
        out.say("LinksTooSlow", True, "SlowerThanNeeded", _told(told, fresh, lasting))
    elif told and well < WELL_SECONDS:
        out.say("LinksTooSlow", True, str(before.get("reason")), told)
    else:
        out.say("LinksTooSlow", False, "FastEnough", "")


def _fact(slot: Slot) -> str:
    return f"thin {slot.region}-{slot.ordinal}"


def _is_thin(slot: Slot) -> bool:
    return slot.link is not None and slot.link.thin


def _told(before: str, regions: list[str], slots: list[Slot]) -> str:
    """The message so far, with these regions added."""
    said = before.removesuffix(_CURE)
    parts = [said] if said else []
    detailed = max(0, DETAILED - said.count(_NUMBERS))
    for region in regions[:detailed]:
        worst = min((s for s in slots if s.region == region), key=lambda s: (_share(s.link), s.ordinal))
        assert worst.link is not None
        parts.append(f"Region {region}{_NUMBERS}{worst.ordinal}): {_figures(worst.link)}.")
    parts += [f"Region {region} too." for region in regions[detailed:]]
    return " ".join(parts) + _CURE


def _share(link: Link | None) -> float:
    """What is there of what is needed, in the worse direction."""
    pairs = ((link.up, link.needs_up), (link.down, link.needs_down)) if link is not None else ()
    return min((there / need for there, need in pairs if there and need), default=1.0)


def _figures(link: Link) -> str:
    parts = []
    for name, there, need in (("up", link.up, link.needs_up), ("down", link.down, link.needs_down)):
        if there:
            parts.append(f"{name} {_rate(there)}{f' of {_rate(need)} needed' if need else ''}")
    if link.round_trip:
        parts.append(f"round trip {seconds_text(_rounded(link.round_trip))}")
    return ", ".join(parts) or "thinner than needed"


def _rate(bytes_per_second: float) -> str:
    return bits_text(_rounded(8 * bytes_per_second))


def _rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


# ------------------------------------------------------------------ other jobs


def _drift(view: View, out: Conditions) -> None:
    fields: dict[str, set[str]] = {}
    for refusal in view.refusals:
        if refusal.reason == JoinRefusal.SPEC_DRIFT and refusal.seconds_ago < LATELY:
            fields.setdefault(_whose(view.job, refusal.role, refusal.region), set()).update(refusal.fields)
    if fields:
        said = "; ".join(f"{whose}: {listed(sorted(found))}" for whose, found in sorted(fields.items()))
        out.say(
            "SpecDrift",
            True,
            "FieldsDiffer",
            f"Refused, because these fields are not as in this copy of the job: {said}. They stay out of the "
            "quorum until their cluster's copy is deleted and this job applied there.",
        )
    else:
        out.say("SpecDrift", False, "SameJob", "")


def _whose(job: Job, role: str, region: str) -> str:
    if role == "evaluator":
        return "the evaluator"
    cluster = next((r.cluster for r in job.spec.regions if r.name == region), None)
    return f"region {region}" + (f" (cluster {cluster})" if cluster else "")
