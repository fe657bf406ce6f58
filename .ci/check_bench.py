"""Has a bench printed a list of {name, value, unit, against, ratio}, every number finite?"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

FIELDS = {"name", "value", "unit", "against", "ratio"}


def problems(rows: object) -> list[str]:
    """What is wrong with the bench's output, in words; empty: nothing."""
    if not isinstance(rows, list) or not rows:
        return ["not a list with at least one row"]
    found = []
    for n, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != FIELDS:
            found.append(f"row {n}: its fields are not {sorted(FIELDS)}: {row!r}"[:300])
            continue
        if not isinstance(row["value"], (int, float)) or not math.isfinite(row["value"]):
            found.append(f"{row['name']}: value {row['value']!r} is not a finite number")
        ratio = row["ratio"]
        if (row["against"] is None) != (ratio is None):
            found.append(f"{row['name']}: `against` and `ratio` go together")
        if ratio is not None and (not isinstance(ratio, (int, float)) or not math.isfinite(ratio)):
            found.append(f"{row['name']}: ratio {ratio!r} is not a finite number")
    return found


def main() -> int:
    path = Path(sys.argv[1])
    rows = json.loads(path.read_text(encoding="utf-8"))
    found = problems(rows)
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if not found:
        for row in rows:
            against = "" if row["ratio"] is None else f"  {row['ratio']:.3g} of {row['against']}"
            print(f"  {row['name']}: {row['value']:.4g} {row['unit']}{against}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
