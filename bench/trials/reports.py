"""The trials' rows as reports (``diloco.reports``): quality against the length of a run, ablations as bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from diloco.console import CommandError
from lab.figures import Axis, Plot, ResultDocument, Series
from lab.report_files import write_report
from trials.cells import CODE
from trials.tables import TrialRow, row_lines

INTERVAL = "Intervals are 95 % by Student's t over seeds, of the seeds' own differences to data-parallel training."


def show_trials(
    document: ResultDocument, rows: Sequence[TrialRow], as_json: bool, directory: Path | None = None
) -> None:
    """Print the rows, or the whole document, and write it into the directory, where there is one. Raises SystemExit."""
    write_trials(document, row_lines(rows), as_json, directory)


def write_trials(document: ResultDocument, lines: Iterable[str], as_json: bool, directory: Path | None) -> None:
    """Print the document's summary and lines, or all of it as JSON, and write report.json, report.md and report.html
    into the directory, where there is one. Raises SystemExit."""
    print(document.model_dump_json() if as_json else "\n".join((document.summary, *lines)))
    if directory is not None:
        try:
            write_report(document, directory)
        except CommandError as error:
            raise SystemExit(str(error)) from error


def quality_report(rows: Sequence[TrialRow], note: str) -> ResultDocument:
    """A plot for each model: the ratio to data-parallel's loss against merges of each fragment, a series each arm."""
    plots = [
        Plot(
            title=f"{model}: held-out loss beside data-parallel training's",
            x=Axis(name="merges of each fragment", log=True),
            y=Axis(name="ratio to data-parallel's loss, above 1 is worse"),
            series=[_against_merges(arm, own) for arm, own in _by_arm(_of_group(rows, model)).items()],
        )
        for model in _groups(rows)
    ]
    return _document("Quality beside data-parallel training", rows, plots, note)


def ablation_report(rows: Sequence[TrialRow], note: str) -> ResultDocument:
    """A plot for each thing that is varied: a bar each arm and length, in per cent above data-parallel's loss."""
    plots = []
    for group in _groups(rows):
        own = _of_group(rows, group)
        places = list(_by_arm(own))
        plots.append(
            Plot(
                title=f"{group}: held-out loss above data-parallel training's",
                x=Axis(name="arm", places=places),
                y=Axis(name="loss above data-parallel's", unit="%"),
                series=[_bars(merges, own, places) for merges in dict.fromkeys(row.merges for row in own)],
            )
        )
    return _document("Ablations: one thing varied at a time", rows, plots, note)


def _document(title: str, rows: Sequence[TrialRow], plots: list[Plot], note: str) -> ResultDocument:
    codes = ", ".join(f"{kind} {code}" for kind, code in CODE.items())
    return ResultDocument(
        title=title,
        summary=note,
        facts={"torch": version("torch"), "code of the trials": codes},
        rows=[asdict(row) for row in rows],
        plots=plots,
        notes=[INTERVAL, "Learners train in one process in virtual time; docs/results/quality.md has the commands."],
    )


def _against_merges(arm: str, rows: Sequence[TrialRow]) -> Series:
    ordered = sorted(rows, key=lambda row: row.merges or 0)
    ratios = [row.ratio for row in ordered]
    return Series(name=arm, x=[row.merges for row in ordered], y=ratios, **_bounds(ordered, lambda ratio: ratio))


def _bars(merges: int | None, rows: Sequence[TrialRow], places: list[str]) -> Series:
    own = [row for row in rows if row.merges == merges]
    excess = [None if row.ratio is None else _percent(row.ratio) for row in own]
    at = [float(places.index(row.arm)) for row in own]
    return Series(name=f"{merges} merges", x=at, y=excess, **_bounds(own, _percent))


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _bounds(rows: Sequence[TrialRow], shown: Callable[[float], float]) -> dict[str, list[float | None]]:
    """``low`` and ``high`` of a series; none where no row has an interval."""
    if all(row.ratio is None or row.interval is None for row in rows):
        return {}
    known = [(row.ratio, row.interval) for row in rows]
    return {
        name: [None if r is None or half is None else shown(r + sign * half) for r, half in known]
        for name, sign in (("low", -1), ("high", 1))
    }


def _groups(rows: Sequence[TrialRow]) -> list[str]:
    return list(dict.fromkeys(row.group for row in rows if row.group))


def _of_group(rows: Sequence[TrialRow], group: str) -> list[TrialRow]:
    return [row for row in rows if row.group == group]


def _by_arm(rows: Sequence[TrialRow]) -> dict[str, list[TrialRow]]:
    found: dict[str, list[TrialRow]] = {}
    for row in rows:
        found.setdefault(row.arm, []).append(row)
    return found
