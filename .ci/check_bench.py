"""Has a bench or a command printed an object with rows of {name, value, unit, baseline, ratio} and more, every number
finite? `baseline` is a number or null, and `against`, where it is a number, the name of what has it. The object's
`rmse`, where it has one, is within its bound."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

FIELDS = {"name", "value", "unit", "baseline", "ratio"}
MOST_RMSE = 1.5  # points of the published goodput


def problems(document: object) -> list[str]:
    """What is wrong with the output, in words; empty: nothing."""
    if not isinstance(document, dict):
        return ["not an object"]
    found = row_problems(document.get("rows"))
    rmse = document.get("rmse")
    if rmse is not None and not rmse <= MOST_RMSE:
        found.append(f"rmse is {rmse!r}, and at most {MOST_RMSE} is bearable")
    return found


def row_problems(rows: object) -> list[str]:
    if not isinstance(rows, list) or not rows:
        return ["not a list with at least one row"]
    found = []
    for n, row in enumerate(rows):
        if not isinstance(row, dict) or not set(row) >= FIELDS:
            found.append(f"row {n}: its fields are not {sorted(FIELDS)}: {row!r}"[:300])
            continue
        if not isinstance(row["value"], (int, float)) or not math.isfinite(row["value"]):
            found.append(f"{row['name']}: value {row['value']!r} is not a finite number")
        ratio, baseline = row["ratio"], row["baseline"]
        if baseline is not None and (not isinstance(baseline, (int, float)) or not math.isfinite(baseline)):
            found.append(f"{row['name']}: baseline {baseline!r} is not a finite number")
        if (baseline in (None, 0)) != (ratio is None):
            found.append(f"{row['name']}: `baseline` and `ratio` go together")
        if ratio is not None and (not isinstance(ratio, (int, float)) or not math.isfinite(ratio)):
            found.append(f"{row['name']}: ratio {ratio!r} is not a finite number")
        elif ratio is not None and baseline is not None and not row.get("against"):
            found.append(f"{row['name']}: `against` does not say what has the baseline")
    return found


def main() -> int:
    path = Path(sys.argv[1])
    document = json.loads(path.read_text(encoding="utf-8"))
    found = problems(document)
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if not found:
        for row in document["rows"]:
            against = "" if row["ratio"] is None else f"  {row['ratio']:.3g} of {row['against']}"
            print(f"  {row['name']}: {row['value']:.4g} {row['unit']}{against}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
