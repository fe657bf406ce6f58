"""HubReachable, SpecDrift and SettingsDiffer in a cluster without the syncer, by its learners.

This operator has no credentials for the hub, and does not read the hub's copy of the job. What it knows are the status
pages of the learners here, and the last line of those that were refused for good.

Each Welcome brings a learner the hub's settings, and its page shows them. Compared with this copy of the job they give
the fields of SettingsDiffer. Such a difference is no fault: the hub's settings are in force here, too. What must not
differ at all the syncer compares itself, by digests (SpecDrift).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diloco_operator.job import Job
from diloco_operator.model import Fact
from diloco_operator.objects.manifests import sync_address
from diloco_operator.plan import refusals
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.pod_status import list_names
from diloco_operator.plan.view import View
from diloco_protocol.common.program_errors import shorten
from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.vocabulary import JobPhase, JoinRefusal

DRAINED = "Drained"
_DRAINED = (JobPhase.DRAINING, JobPhase.SUSPENDED)
DIFFERS_SECONDS = 60.0
"""A difference younger than this is not reported: an edit reaches one cluster after another."""


def decide_region_conditions(view: View, stage: tuple[str, str] | None, out: ConditionSet) -> None:
    """Decide the three. ``stage``: why no learner shall be connected now, reason and message; None: learners shall."""
    refused = _find_refusals(view)
    _decide_hub_reachable(view, stage, refused, out)
    drifted = sorted(message for word, message in refused if word == JoinRefusal.SPEC_DRIFT)
    said = shorten("; ".join(drifted), 1000).rstrip(".")
    message = f"{said}. {refusals.cure_of_refusal(view.job, JoinRefusal.SPEC_DRIFT)}" if drifted else ""
    out.set_fault("SpecDrift", "FieldsDiffer", message, over="SameJob")
    _decide_settings_differ(view, out)


def _find_refusals(view: View) -> set[tuple[str, str]]:
    """Word and sentence of each refusal that keeps a learner of this cluster out."""
    said = {refusals.current_refusal(page) for page in view.pages}
    # A learner that was refused for good has ended, and its page with it.
    away = [pod for pod in view.learners.values() if not pod.ready and not view.taking_part(pod)]
    said |= {refusals.refusal_of_exit(pod.last_end) for pod in away if pod.last_end is not None}
    return {one for one in said if one is not None}


def _decide_hub_reachable(
    view: View, stage: tuple[str, str] | None, refused: set[tuple[str, str]], out: ConditionSet
) -> None:
    address = sync_address(view.job, view.here)
    if stage is not None:
        out.set("HubReachable", "Unknown", *stage)
    elif any(page.connected for page in view.pages):
        out.set("HubReachable", True, "Connected", f"Learners here are connected to {address}.")
    elif refused:
        word, said = min(refused, key=lambda one: (refusals.refusal_rank(one[0]), one))
        message = f"{address}: {shorten(said).rstrip('.')}. {refusals.cure_of_refusal(view.job, word)}"
        out.set("HubReachable", False, refusals.condition_reason(word), message.strip())
    elif hub_has_drained(view):
        out.set(
            "HubReachable",
            False,
            DRAINED,
            f"{address}: the hub has drained the job and does not answer now: it is suspended there, or being "
            "started again. Learners here wait, and continue by themselves when it is back.",
        )
    elif tried := [page for page in view.pages if page.tried]:
        said = min((page.message for page in tried if page.message), default="")
        message = f"{address}: {shorten(said or 'no learner is connected').rstrip('.')}. {refusals.UNREACHED}"
        out.set("HubReachable", False, refusals.condition_reason(""), message)
    elif view.pages:
        out.set("HubReachable", "Unknown", "Preparing", "Learners here are loading data and model; then they connect.")
    else:
        out.set("HubReachable", "Unknown", "NoLearner", "No learner here can be asked yet.")


def hub_has_drained(view: View) -> bool:
    """Whether all learners here have finished a drain in good order and have not been connected since."""
    return bool(view.pages) and all(page.idle and not page.connected and page.phase in _DRAINED for page in view.pages)


# ------------------------------------------------------------------ settings


def _decide_settings_differ(view: View, out: ConditionSet) -> None:
    hub_settings = [page.settings for page in view.pages if page.connected and page.settings is not None]
    if not hub_settings:
        out.keep_or_unknown("SettingsDiffer", "NotHeard", "No learner here has received the hub's settings.")
        return
    own = _own_settings(view.job)
    fields = sorted({field for hub in hub_settings for field in differing_fields(own, hub)})
    lasts = view.observe(Fact.SETTINGS_DIFFER, holds=bool(fields))
    differ = bool(fields) and (lasts >= DIFFERS_SECONDS or view.is_true("SettingsDiffer"))
    message = (
        f"These fields differ from the hub's copy, which applies here too: {list_names(fields)}. "
        "Apply the same job in every cluster."
    )
    out.set_fault("SettingsDiffer", "FieldsDiffer", message if differ else "", over="SameSettings")


def _own_settings(job: Job) -> dict[str, Any]:
    """The settings of this copy of the job, in the form of those in a Welcome."""
    found = SyncerSettings.of(job.spec).model_dump(mode="json", by_alias=True)
    if job.spec.most_slots != job.spec.slots:
        del found["learners"]  # the syncer need not know of another number (decision 067)
    return found


def differing_fields(own: Mapping[str, Any], hub: Mapping[str, Any]) -> list[str]:
    """Paths of the job's fields in which the settings differ. A field that one side lacks, as another release
    may, is not compared."""
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
