"""What a person sees of a job in a cluster: plain functions of API objects and the time.

A job's figures come from two places. Its status (written by the operator, at most every 60 s) is always there; the
syncer's status page has every learner, as it stands, and is read where this account may port-forward. With the page the
picture is the one that ``diloco run`` shows; without, a table of the regions stands in for the learners'. Below either:
the conditions and the last events, in sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.cluster.client import Object
from diloco.local.screen import RunView, blocked_by, outside_view, picture, progress, progress_line, time_left
from diloco.local.summary import nats, number, summary
from diloco.text_console import ByWidth, fitting_table
from diloco_protocol.common.format_units import size_text
from diloco_protocol.documents import DocumentError, Report, StatusDocument, read_document
from diloco_protocol.vocabulary import FAULT_CONDITIONS

EVENTS_SHOWN = 10
UNSEEN = "no operator has looked at it yet"
_ENDS = {"Complete": "green", "Failed": "bold red"}  # and the style of each
_NEUTRAL = frozenset({"Suspended", "Complete", "Reconciling", "Stalled"})  # false: nothing to tell
_WORDS = ("CONTEXT", "NAMESPACE", "NAME", "PHASE", "LEARNERS", "QUORUM")  # columns of the list that are no numbers
_LEFT_OUT = ("GOODPUT", "QUORUM", "TOKENS", "LOSS", "STEP", "DONE")  # of it, in this order, for want of room
_PHASES = {"Complete": "green", "Failed": "red", "Invalid": "red", "Holding": "yellow", "Suspended": "yellow"}


# ------------------------------------------------------------------ figures


def unix(text: Any) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None where it is none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).astimezone(UTC).timestamp()
    except ValueError:
        return None


def span(seconds: float | None) -> str:
    """A duration in one figure and its unit."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def since(time: Any, now: float) -> float | None:
    """Seconds since an RFC 3339 time."""
    at = unix(time)
    return None if at is None else now - at


def condition(job: Object, kind: str) -> Object | None:
    """The job's condition of that type; None: it has none."""
    for one in (job.get("status") or {}).get("conditions") or []:
        if one.get("type") == kind:
            return dict(one)
    return None


def holds(job: Object, kind: str) -> bool:
    """Whether the condition is true of the job's present spec."""
    found = condition(job, kind)
    return found is not None and found["status"] == "True" and _current(job, found)


def _current(job: Object, one: Object) -> bool:
    generation = (job.get("metadata") or {}).get("generation") or 0
    return int(one.get("observedGeneration") or generation) >= int(generation)


def heard(job: Object) -> bool:
    """Whether an operator has looked at the job as it is now."""
    observed = (job.get("status") or {}).get("observedGeneration")
    return observed is not None and observed >= (job["metadata"].get("generation") or 0)


def stop(job: Object) -> tuple[str, float] | None:
    """Unit (steps, tokens or seconds) and limit at which the job ends; None: not known."""
    limits = ((job.get("spec") or {}).get("training") or {}).get("stop") or {}
    for unit in ("steps", "tokens", "seconds"):
        if limits.get(unit) is not None:
            return unit, float(limits[unit])
    return None


def _elapsed(job: Object, now: float) -> float:
    """Seconds from the job's start to its end or now."""
    status = job.get("status") or {}
    begin = unix(status.get("startTime"))
    return 0.0 if begin is None else (unix(status.get("completionTime")) or now) - begin


def _progress(job: Object, now: float) -> str:
    """How far the job is, as its own status knows it."""
    status = job.get("status") or {}
    done = status.get("progress") or {}
    step = done.get("step", (status.get("syncer") or {}).get("step"))
    text = progress(stop(job), step or 0, done.get("tokens"), _elapsed(job, now))
    left = time_left(done.get("percent"), done.get("secondsLeft"))
    return f"{text} ({left})" if left else text


# ------------------------------------------------------------------ sentences


def condition_text(one: Object, now: float) -> Text:
    """One condition as a sentence: what is so, since when, why, and what to do."""
    kind, state = str(one.get("type")), str(one.get("status"))
    said = {"True": kind, "False": f"not {kind}"}.get(state, f"{kind} not known")
    reason = f" ({one['reason']})" if one.get("reason") and one["reason"] != kind else ""
    text = Text(f"{said}{reason} for {span(since(one.get('lastTransitionTime'), now))}", condition_style(one))
    return text + Text(f": {one['message']}" if one.get("message") else "")


def condition_style(one: Object) -> str:
    """Green where it is as it should be, red where it is not."""
    kind, state = str(one.get("type")), str(one.get("status"))
    if kind in _ENDS:
        return _ENDS[kind] if state == "True" else "dim"
    if kind in _NEUTRAL:
        return "yellow" if state == "True" else "dim"
    return "green" if (state == "True") != (kind in FAULT_CONDITIONS) and state != "Unknown" else "red"


def conditions_shown(job: Object) -> list[Object]:
    """The conditions worth a line: trouble first, and nothing that only says that there is none."""
    found = [
        one
        for one in (job.get("status") or {}).get("conditions") or []
        if one.get("status") == "True" or one.get("type") not in FAULT_CONDITIONS | _NEUTRAL
    ]
    return sorted(found, key=lambda one: condition_style(one) != "red")


def event_time(event: Object) -> float:
    """When it was last seen, unix seconds."""
    series = event.get("series") or {}
    for time in (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    ):
        if time and (at := unix(time)) is not None:
            return at
    return 0.0


def event_count(event: Object) -> int:
    return int((event.get("series") or {}).get("count") or event.get("count") or 1)


def event_line(event: Object, now: float) -> Text:
    times = f" ({event_count(event)} times)" if event_count(event) > 1 else ""
    warning = event.get("type") == "Warning"
    head = Text(f"{span(now - event_time(event)):>7} ago  ", "dim")
    said = f"{event.get('reason')}: {' '.join(str(event.get('message') or '').split())}{times}"
    return head + Text(said, "yellow" if warning else "")


def region_names(job: Object) -> list[str]:
    """The names of the job's regions; one without a name is called as by default."""
    return [str(one.get("name") or "local") for one in (job.get("spec") or {}).get("regions") or []]


# ------------------------------------------------------------------ pictures


def jobs_table(jobs: Sequence[Object], now: float, contexts: Sequence[str] = (), spaces: bool = False) -> ByWidth:
    """A line for each of the jobs, of which there is one at least; with the column of contexts (one for each job) or
    namespaces where there are several."""
    rows = [
        {
            **({"CONTEXT": contexts[index]} if contexts else {}),
            **({"NAMESPACE": str((job.get("metadata") or {}).get("namespace"))} if spaces else {}),
            **_job_cells(job, now),
        }
        for index, job in enumerate(jobs)
    ]
    # Two columns of the terminal stay free at the right.
    return ByWidth(lambda width: fitting_table([*rows[0]], rows, width - 2, left=_WORDS, left_out=_LEFT_OUT))


def _job_cells(job: Object, now: float) -> dict[str, str | Text]:
    status, metadata = job.get("status") or {}, job.get("metadata") or {}
    done = status.get("progress") or {}
    phase = str(status.get("phase") or "-")
    return {
        "NAME": str(metadata.get("name")),
        "PHASE": Text(phase, _PHASES.get(phase, "")),
        "LEARNERS": str(status.get("learners") or "-"),
        "QUORUM": str(status.get("quorum") or "-"),
        "STEP": number(done.get("step")),
        "TOKENS": number(done.get("tokens")),
        "DONE": "-" if done.get("percent") is None else f"{done['percent']} %",
        "LOSS": nats(done.get("loss")),
        "GOODPUT": nats(done.get("goodput")),
        "AGE": span(since(metadata.get("creationTimestamp"), now)),
    }


def regions_table(job: Object, now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("region", "cluster", "learners", "ready", "in quorum", "state", ""):
        table.add_column(title, justify="right" if title in ("learners", "ready", "in quorum") else "left")
    for region in (job.get("status") or {}).get("regions") or []:
        lost = since(region.get("lostSince"), now)
        cause = str(region.get("cause") or "") + ("" if lost is None else f" (not heard for {span(lost)})")
        table.add_row(
            str(region.get("name")),
            str(region.get("cluster") or "-"),
            str(region.get("desired", "-")),
            str(region.get("ready", "-")),
            str(region.get("inQuorum", "-")),
            str(region.get("state") or "-"),
            Text(cause.strip(), "yellow"),
        )
    return table


def job_picture(job: Object, page: StatusDocument | None, events: Sequence[Object], now: float) -> RenderableType:
    """The whole of ``diloco status NAME``. ``page``: the syncer's status document, or None."""
    metadata, status = job["metadata"], job.get("status") or {}
    conditions = conditions_shown(job)
    parts: list[RenderableType] = []
    if page is not None:
        parts.append(picture(outside_view(page, stop(job)), [], whole=True))
        told = any(str(one.get("message")).startswith(page.message) for one in conditions)
        if page.message and not blocked_by(page) and not told:
            parts.append(Text(page.message))
    else:
        parts += [_head(job, now), ""]
    shown = status.get("regions") or []
    if page is None or len(shown) > 1 or any(region.get("cause") for region in shown):
        if shown:
            parts.append(regions_table(job, now))
        elif not status.get("conditions"):
            parts.append(Text(UNSEEN, "yellow"))
    if (replaced := (status.get("replacements") or {}).get("total")) and page is None:
        parts.append(f"{replaced} replaced since the job began")
    if conditions:
        parts += ["", *(condition_text(one, now) for one in conditions)]
    if (final := status.get("report")) and (holds(job, "Complete") or holds(job, "Failed")):
        try:
            report = read_document(Report, final)
            parts += ["", summary(report, report.outcome)]  # the condition has the reason
        except DocumentError as error:
            parts += ["", Text(f"its report cannot be read: {error}", "yellow")]
    if output := status.get("output"):
        parts.append(_output_line(output))
    if (metadata.get("deletionTimestamp")) is not None:
        gone = span(since(metadata["deletionTimestamp"], now))
        parts.append(Text(f"being deleted for {gone}", "yellow"))
    if last := sorted(events, key=event_time)[-EVENTS_SHOWN:]:
        parts += ["", *(event_line(event, now) for event in last)]
    return Group(*parts)


def _output_line(output: Object) -> Text:
    """Where the merged model lies, or why it does not."""
    uri, state = str(output.get("uri")), str(output.get("state"))
    if state == "Written":
        return Text(f"its merged model is at {uri} ({size_text(output.get('size') or 0)})", "green")
    why = f": {output['message']}" if output.get("message") else ""
    said = f"is being written to {uri}" if state == "Writing" else f"was not written to {uri}"
    return Text(f"its merged model {said}{why}", "yellow" if state == "Writing" else "red")


def _figure(name: str, value: float | None) -> str:
    """Empty where there is none: before the first evaluation, and in a job without an evaluator."""
    return "" if value is None else f"{name} {nats(value)}"


def _head(job: Object, now: float) -> Table:
    status = job.get("status") or {}
    done = status.get("progress") or {}
    phase = str(status.get("phase") or "new")
    active, _, required = (status.get("quorum") or "").partition("/")
    head = Table.grid(padding=(0, 3))
    head.add_row(
        Text(str(job["metadata"]["name"]), style="bold"),
        Text(phase, style=f"bold {_PHASES.get(phase, 'cyan')}"),
        f"{_elapsed(job, now):.0f} s",
        _progress(job, now),
        _figure("merged loss", done.get("loss")),
        _figure("goodput", done.get("goodput")),
        f"quorum {active} active, {required} needed" if required else "",
    )
    return head


def job_line(job: Object, page: StatusDocument | None, now: float) -> str:
    """The job on one line, as ``--wait`` prints it; with the syncer's page, as ``diloco run`` does."""
    status = job.get("status") or {}
    if not status.get("phase"):
        return UNSEEN
    if page is not None:
        return progress_line(RunView(str(job["metadata"]["name"]), stop(job), page, serving=True))
    done = status.get("progress") or {}
    loss, goodput = _figure("loss", done.get("loss")), _figure("goodput", done.get("goodput"))
    cells = [
        f"{_elapsed(job, now):7.1f} s",
        str(status["phase"]),
        _progress(job, now),
        loss,
        f"learners {status.get('learners') or '-'}",
        f"quorum {status.get('quorum') or '-'}",
        goodput,
    ]
    return "  ".join(cell for cell in cells if cell)
