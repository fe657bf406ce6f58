"""Which worlds tests/worlds.py runs, and what a failure of one says of a change. Nothing here runs anything."""

from __future__ import annotations

import enum
import json
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BUDGETS = {"core": 90.0, "shell": 60.0, "workers": 30.0, "operator": 90.0}  # seconds of processor time for new seeds
RECORDED: dict[str, dict[str, range]] = {
    "core": {
        "HARSH": range(500),
        "ORDINARY": range(1, 1000, 4),
        "SCALED": range(1, 1000, 20),
        "WIPED": range(1, 1000, 20),
        **dict.fromkeys(("MOVED", "SPARES", "VISITED", "CROSSINGS", "LIVE_1", "LIVE_2", "LIVE_3"), range(50)),
        "CHANGED": range(200),
        "SLOW": range(50),
        "DRAWN": range(200),
        "SHARDS": range(200),
        "LEASES": range(50),
        "BROKEN": range(16),
    },
    "shell": {
        "TROUBLE": range(60),
        "LOSING": range(60),
        "STANDING_BY": range(12),
        "CHANGED": range(30),
        "SUCCESSIONS": range(5, 20),
        "FORGED": range(12),
        "DISK": range(6),
        "FLIPPED": range(6),
        "BUCKET": range(6),
        "INTERRUPTED": range(12),
        "DAMAGED": range(20),
        "SHARDED": range(12),
    },
    "workers": dict.fromkeys(
        (
            *("LINKS", "RESTARTS", "GOING_BACK", "STANDING_BY", "LEAVING"),
            *("SCHEDULED", "SHARDED", "SCHEDULED_SHARDS", "DRAWN"),
        ),
        range(5),
    ),
    "operator": {"FAULTS": range(12), "LIVES": range(12), "GROUPS": range(12), "SHARDED": range(12)},
}
NIGHTLY = {
    "operator": ("LIVES", "GROUPS", "SHARDED"),
    "shell": ("DISK", "FLIPPED", "BUCKET"),
    "workers": ("SCHEDULED", "SCHEDULED_SHARDS"),
}
"""Settings in which worlds still fail now and then, or of which few were run yet: only `make nightly` draws them, and a
run that names them."""


def drawn_settings(simulation: str, nightly: bool, named: str | None = None) -> list[str]:
    """The settings of which worlds are run. ``named``: the one that a person asks for."""
    if named is not None:
        return [named]
    return [one for one in RECORDED[simulation] if nightly or one not in NIGHTLY.get(simulation, ())]


@dataclass(frozen=True)
class Case:
    """One world. ``changes``: fields of the setting that differ, as a JSON object."""

    simulation: str
    setting: str
    seed: int
    changes: str = "{}"

    @property
    def arguments(self) -> list[str]:
        words = ["--simulation", self.simulation, "--setting", self.setting, "--seed", str(self.seed)]
        return words + (["--with", self.changes] if self.changes != "{}" else [])

    @property
    def command(self) -> str:
        return shlex.join([".venv/bin/python", "tests/worlds.py", *self.arguments])


def recorded_seeds() -> list[Case]:
    return [Case(name, kind, seed) for name, kinds in RECORDED.items() for kind, some in kinds.items() for seed in some]


class Verdict(enum.Enum):
    GOOD = "good"
    RED = "FAILED"
    KNOWN = "KNOWN BEFORE"
    OPEN = "KNOWN, AND OPEN"


def judge(failed: bool, *, recorded: bool, is_open: bool, failed_before: bool | None) -> Verdict:
    """What a world says of this change. ``is_open``: found_seeds.jsonl has it, not mended; ``failed_before``: whether
    it fails on the commit before too, None where that is not known."""
    if not failed:
        return Verdict.GOOD
    if is_open:
        return Verdict.OPEN
    return Verdict.KNOWN if failed_before and not recorded else Verdict.RED


def choose_base(head: str, merge_base: str | None, earlier: str | None, changed: bool) -> str | None:
    """The commit before this change: where it left main; else, on main itself, HEAD if files differ from it, and
    ``earlier`` if none does."""
    if merge_base not in (None, head):
        return merge_base
    return head if changed else earlier


def read_found(text: str) -> dict[Case, bool]:
    """The worlds of found_seeds.jsonl, and whether each is mended."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return {
        Case(row["simulation"], row["setting"], row["seed"], json.dumps(row.get("with", {}))): row["mended"] is not None
        for row in rows
    }


def found_line(case: Case, commit: str, failed: str) -> str:
    row: dict[str, Any] = {"simulation": case.simulation, "setting": case.setting, "seed": case.seed}
    if case.changes != "{}":
        row["with"] = json.loads(case.changes)
    return json.dumps(row | {"commit": commit, "failed": failed.partition("\n")[0][:200], "mended": None})


@dataclass
class NewSeeds:
    """Which new world comes next: one of the simulation that has used the least of its budget."""

    budgets: dict[str, float]
    first: dict[str, int]
    settings: dict[str, list[str]]
    used: Counter[str] = field(default_factory=Counter)  # seconds, so far
    begun: Counter[str] = field(default_factory=Counter)

    def next(self) -> Case | None:
        shares = {name: self.used[name] / budget for name, budget in self.budgets.items() if budget > 0}
        name = min(shares, key=lambda name: (shares[name], self.begun[name]), default=None)
        if name is None or shares[name] >= 1.0:
            return None
        seed, settings = self.first[name] + self.begun[name], self.settings[name]
        self.begun[name] += 1
        return Case(name, settings[seed % len(settings)], seed)
