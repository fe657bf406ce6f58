"""A report as a person reads it at the end of a run: what came of it, what went wrong on the way and what that cost.

Times are as people say them, sizes have three digits. What is not known has no line.
"""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from diloco_protocol.common.format_units import duration_text, seconds_text, size_text
from diloco_protocol.documents import FaultRow, OutputRow, RegionRow, Report

_DONE = {"kill": "killed", "term": "told to leave", "pause": "paused", "cut": "cut off", "slow": "slowed down"}
_PASSING = frozenset({"pause", "cut", "slow"})
_REASONS = {
    "died": "with a process that ended",
    "drain": "not merged before their learner left",
    "overlap": "trained while a newer version was on its way",
    "stale": "on a version too old",
    "rolled-back": "in versions that the store lost",
}
_PENDING = {
    "complete": "not merged before the end: fewer learners offered it than a merge needs, or its process had ended",
    "interrupted": "kept in the store, merged when the job continues",
    "killed": "on their way when it was killed",
    "running": "on their way",
}

NAMED = 5  # learners in one row


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def summary(report: Report, outcome: str = "") -> Table:
    """The report as a small table. ``outcome``: what to say in the place of the report's."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    row = table.add_row
    row("outcome", outcome or _outcome(report))
    has_loss = report.training_loss is not None or report.is_scored
    if has_loss:
        row(*_loss(report))
    if report.tokens.trained or report.merges or has_loss:
        row("tokens", tokens_text(report))
        row("merges", _merges(report))
        if idle := _without_a_merge(report):
            row("learners", idle)
        if report.goodput is not None:
            row("goodput", _goodput(report))
        row("traffic", f"{size_text(report.bytes_up)} up, {size_text(report.bytes_down)} down")
        regions = report.regions or []
        several = sum(region.name not in ("", "evaluator") for region in regions) > 1
        for region in regions if several else ():
            row(f"  {region.name or 'others'}", carried_text(region))
    if report.output is not None:
        row("model", output_text(report.output))
    began_earlier = (report.syncer.epoch or 1) > report.syncer.restarts + 1  # `diloco run` counts those of this run
    whole = report.outcome in ("killed", "running")  # the last figures seen are of the job's own clock
    row("time", duration_text(report.wall_seconds or 0) + " in this run" * (began_earlier and not whole))
    for fault in report.faults:
        row("fault", fault_text(fault, report))
    return table


def _outcome(report: Report) -> str:
    message = report.message if report.outcome != "complete" else ""
    return f"{report.outcome}: {message}" if message else report.outcome


def _loss(report: Report) -> tuple[str, str]:
    own = report.training_loss
    if own is not None:
        ends = f"{nats(own.first)} in the first step, {nats(own.last)} in the last"
        return "training loss", f"{ends}: the learners' own; no evaluator scored the model"
    scored = [loss for _, loss in report.eval_loss if loss is not None]
    if report.initial_loss is None and report.final_loss is None and scored:
        return "loss", f"{nats(scored[-1])}, the last score of the merged model (nats per token)"
    last = f"{nats(report.final_loss)} at the end"
    if report.final_loss is None and scored:
        last = f"{nats(scored[-1])} at the last score"
    return "loss", f"{nats(report.initial_loss)} at the start, {last} (nats per token)"


def tokens_text(report: Report) -> str:
    """What became of the tokens; of what is not in the model, why."""
    tokens = report.tokens
    pending = f"{number(tokens.pending)} pending"
    if not tokens.pending:
        pending = "nothing pending"
    elif report.outcome == "interrupted" and report.ledger is None:  # neither the syncer nor its store could be asked
        pending += " (as last heard)"
    elif report.outcome in _PENDING:
        pending += f" ({_PENDING[report.outcome]})"
    dropped = "nothing dropped"
    if tokens.dropped:
        share = share_text(tokens.dropped / max(1, tokens.trained))
        found = [(number(count), _REASONS.get(name, name)) for name, count in dropped_by_reason(report)]
        if len(found) == 1:
            share += f", {found[0][1]}"
        elif found:
            share += f": {', '.join(f'{count} {reason}' for count, reason in found)}"
        dropped = f"{number(tokens.dropped)} dropped ({share})"
    return f"{number(tokens.trained)} trained, {number(tokens.merged)} merged, {pending}, {dropped}"


def dropped_by_reason(report: Report) -> list[tuple[str, int]]:
    """Whole tokens that were dropped, by reason, of reasons with at least one; the most first. Their sum is the
    report's: what rounding leaves is the first one's."""
    parts: Counter[str] = Counter()
    for row in report.ledger or []:
        parts.update(row.reasons)
    whole = [(name, round(count / len(report.ledger or [0]))) for name, count in parts.most_common()]
    whole = [(name, count) for name, count in whole if count]
    if whole:
        rest = report.tokens.dropped - sum(count for _, count in whole)
        whole[0] = (whole[0][0], whole[0][1] + round(rest))
    return whole


def _merges(report: Report) -> str:
    versions = report.versions
    times = f"{versions.min}" if versions.min == versions.max else f"{versions.min} to {versions.max}"
    merged = report.learners_in_merges
    learners = "" if merged is None else f", of {merged:.1f} learners on average"
    steps = f"in {number(report.steps)} steps of the fastest learner"
    return f"{number(report.merges)}{learners}; each fragment {times} times, {steps}"


def _without_a_merge(report: Report) -> str:
    """Which learners of a complete job have nothing in its model; empty: none, or it is not known."""
    if report.outcome != "complete" or not report.merges:
        return ""
    rows = report.learners or []
    idle = [row.learner for row in rows if row.learner and not row.retired and not row.merged_pushes]
    if not idle:
        return ""
    more = f" and {len(idle) - NAMED} more" if len(idle) > NAMED else ""
    return f"{', '.join(idle[:NAMED])}{more} never contributed to a merge"


def _goodput(report: Report) -> str:
    text = f"{share_text(report.goodput or 0.0)} of the learners' time was computing that was merged"
    if report.uptime is None:
        return text
    return f"{text}; at least one learner made progress {share_text(report.uptime)} of the time"


def share_text(share: float) -> str:
    """A share in per cent, with as many digits as say something."""
    percent = 100 * share
    return f"{percent:.2g} %" if 0 < percent < 0.995 else f"{percent:.1f} %".replace(".0 %", " %")


def carried_text(region: RegionRow) -> str:
    text = f"{size_text(region.bytes_up)} up, {size_text(region.bytes_down)} down"
    if region.wire_bytes_up is None:
        return text
    up, down = size_text(region.wire_bytes_up), size_text(region.wire_bytes_down or 0)
    return f"{text}; with all beside it and TLS {up} up, {down} down"


def output_text(output: OutputRow) -> str:
    """Where the merged model lies, or why it does not."""
    if output.state == "written":
        return f"{output.uri}, {size_text(output.size)}"
    return f"not in {output.uri} ({output.state}){': ' if output.message else ''}{output.message}"


def fault_text(fault: FaultRow, report: Report) -> str:
    """One fault and what it cost, in a sentence."""
    lasting = f" for {seconds_text(fault.lasts_seconds)}" if fault.lasts_seconds else ""
    if fault.action == "kill" and lasting:
        lasting = f" and kept away{lasting}"
    said = f"{fault.target} {_DONE.get(fault.action, fault.action)}{lasting} at {fault.at_seconds:.1f} s"
    if fault.detected_seconds is None and fault.joined_seconds is None:
        return f"{said}; {'nothing was lost' if fault.action in _PASSING else 'nothing was seen of it'}"
    back = "replaced" if fault.action in ("kill", "term") and fault.target != "syncer" else "learners joined again"
    parts = [
        f"{words} after {seconds_text(seconds)}"
        for words, seconds in (
            ("noticed", fault.detected_seconds),
            (back if fault.action not in _PASSING else "back", fault.joined_seconds),
            ("training again", fault.first_step_seconds),
            ("merging again", fault.recovered_seconds),
        )
        if seconds is not None
    ]
    text = f"{said}: {', '.join(parts)}"
    if fault.recovered_seconds is None:
        text += ", not merged again before the end"
    lost = dict(dropped_by_reason(report)).get("died")
    # The ledger is the whole job's, and the faults are this run's alone.
    first_run = report.syncer.epoch == 1 + report.syncer.restarts
    if lost and first_run and len(report.faults) == 1 and fault.action == "kill":
        text += f"; {number(lost)} tokens lost ({share_text(lost / max(1, report.tokens.trained))})"
    if fault.target != "syncer" and report.holds is not None and not _held(report, fault):
        text += "; merges continued meanwhile"
    return text


def _held(report: Report, fault: FaultRow) -> bool:
    """Whether the job held between a fault and its end."""
    until = float("inf") if fault.recovered_seconds is None else fault.at_seconds + fault.recovered_seconds
    return any(hold.from_seconds < until and hold.to_seconds > fault.at_seconds for hold in report.holds or [])
