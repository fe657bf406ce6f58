"""Does the demo's report say what a demo must: complete, the killed learner back, tokens accounted for?"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path


def problems(report: dict) -> list[str]:
    """What is wrong with the report, in words; empty: nothing."""
    found = []
    if report.get("schema") != 1:
        found.append(f"schema is {report.get('schema')!r}, not 1")
    if report.get("outcome") != "complete":
        found.append(f"outcome is {report.get('outcome')!r}, not 'complete'")
    faults = report.get("faults") or []
    if not faults:
        found.append("no fault is recorded, but the demo kills a learner")
    for fault in faults:
        if not isinstance(fault.get("recovered_seconds"), (int, float)):
            found.append(f"the fault {fault.get('action')} {fault.get('target')} never recovered")
    initial, final = report.get("initial_loss"), report.get("final_loss")
    for name, loss in (("initial_loss", initial), ("final_loss", final)):
        if not isinstance(loss, (int, float)) or not math.isfinite(loss):
            found.append(f"{name} is {loss!r}, not a finite number")
    if not found and not final < initial - 1.0:
        found.append(f"the merged model did not learn: loss {initial} at the start, {final} at the end")
    tokens = report.get("tokens") or {}
    if not tokens.get("trained", 0) > 0:
        found.append("no token was trained")
    if tokens.get("trained") != sum(tokens.get(name, 0) for name in ("merged", "pending", "dropped")):
        found.append(f"merged + pending + dropped is not trained: {tokens}")
    for row in report.get("ledger") or []:
        if row["merged"] + row["pending"] + row["dropped"] != tokens.get("trained"):
            found.append(f"ledger row of fragment {row['fragment']} does not sum to {tokens.get('trained')}")
        if sum(row["reasons"].values()) != row["dropped"]:
            found.append(f"fragment {row['fragment']} dropped {row['dropped']} for reasons {row['reasons']}")
    if not report.get("ledger"):
        found.append("the ledger is empty")
    if not report.get("merges", 0) > 0:
        found.append("nothing was merged")
    return found


def main() -> int:
    path = Path(sys.argv[1])
    report = json.loads(path.read_text(encoding="utf-8"))
    found = problems(report)
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if not found:
        recovered = [fault["recovered_seconds"] for fault in report["faults"]]
        print(f"report: loss {report['initial_loss']:.3f} -> {report['final_loss']:.3f}, "
              f"{report['merges']} merges, recovered after {recovered} s")  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
