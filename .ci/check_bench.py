"""Has a bench printed a list of {name, value, unit, against, ratio}, or a command an object with rows of {name, value,
unit, baseline, ratio} and more, every number finite? `baseline` is a number, and `against` the name of what has it. An
object's `rmse`, where it has one, is within its bound."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

FIELDS = {"name", "value", "unit", "against", "ratio"}
DOCUMENT_FIELDS = {"name", "value", "unit", "baseline", "ratio"}
MOST_RMSE = 1.5  # points of the published goodput


def problems(document: object) -> list[str]:
    """What is wrong with the output, in words; empty: nothing."""
    if not isinstance(document, dict):
        return row_problems(document, "against", lambda fields: fields == FIELDS)
    found = row_problems(document.get("rows"), "baseline", lambda fields: fields >= DOCUMENT_FIELDS)
    rmse = document.get("rmse")
    if rmse is not None and not rmse <= MOST_RMSE:
        found.append(f"rmse is {rmse!r}, and at most {MOST_RMSE} is bearable")
    return found


def row_problems(rows: object, reference: str, fits: Callable[[set[str]], bool]) -> list[str]:
    """``reference``: the field that is null where `ratio` is."""
    if not isinstance(rows, list) or not rows:
        return ["not a list with at least one row"]
    found = []
    for n, row in enumerate(rows):
        if not isinstance(row, dict) or not fits(set(row)):
            found.append(f"row {n}: its fields are not {sorted(FIELDS)}: {row!r}"[:300])
            continue
        if not isinstance(row["value"], (int, float)) or not math.isfinite(row["value"]):
            found.append(f"{row['name']}: value {row['value']!r} is not a finite number")
        ratio, baseline = row["ratio"], row.get("baseline")
        if baseline is not None and (not isinstance(baseline, (int, float)) or not math.isfinite(baseline)):
            found.append(f"{row['name']}: baseline {baseline!r} is not a finite number")
        if (row[reference] in (None, 0)) != (ratio is None):
            found.append(f"{row['name']}: `{reference}` and `ratio` go together")
        if ratio is not None and (not isinstance(ratio, (int, float)) or not math.isfinite(ratio)):
            found.append(f"{row['name']}: ratio {ratio!r} is not a finite number")
    return found


def main() -> int:
    path = Path(sys.argv[1])
    document = json.loads(path.read_text(encoding="utf-8"))
    found = problems(document)
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if not found:
        for row in document["rows"] if isinstance(document, dict) else document:
            against = "" if row["ratio"] is None else f"  {row['ratio']:.3g} of {row.get('against', 'the baseline')}"
            print(f"  {row['name']}: {row['value']:.4g} {row['unit']}{against}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
