"""What a hub of large models needs, as ``diloco plan`` computes it (tools/generate.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco import bandwidth_plan
from diloco.bandwidth_plan import Conditions
from diloco_protocol.common.format_units import size_text

JOB = Path(__file__).resolve().parent.parent / "examples/minimal.yaml"
SPREAD = ("sync.every=96", "sync.fragments=96")
FIVE = (("`bfloat16` down", "5e9", ()), ("`delta-int4` down", "5e9", ("sync.compression.down=delta-int4",)))
SEVENTY = (
    ("`delta-int4` down", "70e9", ("sync.compression.down=delta-int4",)),
    ("H = P = 96, `bfloat16` down", "70e9", SPREAD),
    ("H = P = 96, `delta-int4` down", "70e9", (*SPREAD, "sync.compression.down=delta-int4")),
)


def tables() -> dict[str, str]:
    """Of eight learners and steps of a second: a table for each size."""
    return {"hub of 5 billion": _table(FIVE), "hub of 70 billion": _table(SEVENTY)}


def _table(cases: tuple[tuple[str, str, tuple[str, ...]], ...]) -> str:
    plans = [
        bandwidth_plan.plan(JOB, ["regions.0.learners=8", *changes], size, Conditions(step_seconds=1.0))
        for _, size, changes in cases
    ]
    heads = ["", *(head for head, _, _ in cases)]
    rows = [[name, *(make(plan) for plan in plans)] for name, make in ROWS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _shards(plan: dict[str, Any]) -> str:
    hub = plan["hub"]
    over = f", and there are {hub['shards']} fragments" if hub["wanted"] > hub["shards"] else ""
    return f"{hub['wanted']}{over}"


def _link(plan: dict[str, Any], which: str) -> str:
    return " / ".join(f"{rate / 1e9:.3g}" for rate in plan["queued"][which].values() if rate is not None)


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "cores: bytes, norms, merges": lambda plan: ", ".join(
        f"{plan['hub'][f'{name}_cores']:.3g}" for name in ("byte", "norm", "merge")
    ),
    "cores in all": lambda plan: f"{plan['hub']['cores']:.3g}",
    "shards wanted": _shards,
    "memory, in all": lambda plan: size_text(plan["hub"]["memory"]),
    "memory, of a shard": lambda plan: size_text(plan["hub"]["shard_memory"]),
    "disk": lambda plan: size_text(plan["resources"]["syncer_volume_bytes"]),
    "written to it": lambda plan: f"{size_text(plan['hub']['written'])}/s",
    "the hub's payload, in / out": lambda plan: " / ".join(
        f"{size_text(plan['hub'][name])}/s" for name in ("bytes_in", "bytes_out")
    ),
    "the hub's link by queue, in / out, Gbit/s": lambda plan: _link(plan, "hub"),
}
