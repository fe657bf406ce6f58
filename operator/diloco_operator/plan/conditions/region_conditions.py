"""What a cluster without the syncer can tell of the job's hub, by its learners: is it reached, and is
this copy of the job the hub's?

Theory of operation. Nobody here has credentials for the hub, or reads its copy of the job.
What is known is what learners here say on their status pages, and in the last line of those
that were refused for good. Each Welcome brings the hub's settings, and a learner shows them;
compared with this copy they tell which fields differ. That is no fault: the hub's rule, here
too. What may not differ at all the syncer compares itself, by digests (``SpecDrift``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diloco_operator.job import Job
from diloco_operator.objects.manifests import reachable_at
from diloco_operator.plan import refusals
from diloco_operator.plan.conditions.conditions import Conditions, listed
from diloco_operator.plan.pods.pod_status import shortened
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import JobPhase, JoinRefusal

DRAINED = "Drained"
_DRAINED = (JobPhase.DRAINING, JobPhase.SUSPENDED)
DIFFERS_SECONDS = 60.0
"""An edit reaches clusters one after another: a difference younger than this is nothing to tell."""


def judge(view: View, stage: tuple[str, str] | None, out: Conditions) -> None:
    """``stage``: reason and message of why nobody is to be connected now; None: learners are."""
    kept_out = _kept_out(view)
    _reachable(view, stage, kept_out, out)
    drifted = sorted(message for word, message in kept_out if word == JoinRefusal.SPEC_DRIFT)
    if drifted:
        said = shortened("; ".join(drifted), 1000).rstrip(".")
        out.say("SpecDrift", True, "FieldsDiffer", f"{said}. {refusals.cure(view.job, JoinRefusal.SPEC_DRIFT)}")
    else:
        out.say("SpecDrift", False, "SameJob", "")
    _differs(view, out)


def _kept_out(view: View) -> set[tuple[str, str]]:
    """Word and sentence of what keeps learners here out."""
    said = {refusals.current(document) for document in view.pages}
    # Who was refused for good ends by it, and its page with it.
    away = [pod for pod in view.learners.values() if not pod.ready and not view.taking_part(pod)]
    said |= {refusals.ended(pod.last_end) for pod in away if pod.last_end is not None}
    return {one for one in said if one is not None}


def _reachable(view: View, stage: tuple[str, str] | None, kept_out: set[tuple[str, str]], out: Conditions) -> None:
    address = reachable_at(view.job, view.here)
    if stage is not None:
        out.say("HubReachable", "Unknown", *stage)
    elif any(document.get("connected") for document in view.pages):
        out.say("HubReachable", True, "Connected", f"Learners here are connected to {address}.")
    elif kept_out:
        word, said = min(kept_out, key=lambda one: (refusals.rank(one[0]), one))
        message = f"{address}: {shortened(said).rstrip('.')}. {refusals.cure(view.job, word)}"
        out.say("HubReachable", False, refusals.reason(word), message.strip())
    elif drained(view):
        out.say(
            "HubReachable",
            False,
            DRAINED,
            f"{address}: the hub has drained the job, and is not there now: it is suspended there, or being "
            "started again. Learners here wait, and go on by themselves when it is back.",
        )
    elif tried := [page for page in view.pages if page.get("tried", True)]:
        said = min((str(page["message"]) for page in tried if page.get("message")), default="")
        message = f"{address}: {shortened(said or 'no learner is connected').rstrip('.')}. {refusals.UNREACHED}"
        out.say("HubReachable", False, refusals.reason(""), message)
    elif view.pages:
        out.say("HubReachable", "Unknown", "Preparing", "Learners here load what they need, and connect then.")
    else:
        out.say("HubReachable", "Unknown", "NoLearner", "No learner here can be asked yet.")


def drained(view: View) -> bool:
    """Whether learners here have left a drain in good order, and hear nobody since."""
    return bool(view.pages) and all(
        page.get("idle") and not page.get("connected") and page.get("phase") in _DRAINED for page in view.pages
    )


# ------------------------------------------------------------------ settings


def _differs(view: View, out: Conditions) -> None:
    told = [page["settings"] for page in view.pages if page.get("connected") and isinstance(page.get("settings"), dict)]
    before = view.condition("SettingsDiffer")
    if not told:
        if before:  # what was last known stands
            out.say("SettingsDiffer", before["status"], str(before.get("reason")), str(before.get("message")))
        else:
            out.say("SettingsDiffer", "Unknown", "NotHeard", "No learner here has heard of the hub's settings.")
        return
    own = _own(view.job)
    fields = sorted({field for hub in told for field in differences(own, hub)})
    lasts = view.lasting("copy differs", bool(fields))
    if fields and (lasts >= DIFFERS_SECONDS or before.get("status") == "True"):
        out.say(
            "SettingsDiffer",
            True,
            "FieldsDiffer",
            f"Not as at the hub, whose settings are in force here too: {listed(fields)}. "
            "Apply the same job in every cluster.",
        )
    else:
        out.say("SettingsDiffer", False, "SameSettings", "")


def _own(job: Job) -> dict[str, Any]:
    """This copy's settings, in the form in which a syncer says its own."""
    spec = job.spec
    return {
        "sync": spec.sync.model_dump(mode="json", by_alias=True),
        "learners": spec.slots,
        "stop": spec.training.stop.model_dump(mode="json", by_alias=True),
    }


def differences(own: Mapping[str, Any], hub: Mapping[str, Any]) -> list[str]:
    """Fields of the job in which the settings differ. What one side does not have, as another release may
    not, is not compared."""
    called = {"sync": "sync", "learners": "regions[].learners (in all)", "stop": "training.stop"}
    found: list[str] = []
    for key, path in called.items():
        if key in own and key in hub:
            found += _differing(own[key], hub[key], path)
    return found


def _differing(own: Any, hub: Any, path: str) -> Iterator[str]:
    if isinstance(own, Mapping) and isinstance(hub, Mapping):
        for key in own.keys() & hub.keys():
            yield from _differing(own[key], hub[key], f"{path}.{key}")
    elif own != hub:
        yield path
