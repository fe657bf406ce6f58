"""``diloco plan``: how much bandwidth, memory, disk and cores a job needs, before anything is built or bought.

The numbers come from ``diloco_protocol.bandwidth`` and ``diloco_protocol.resources``; here they are put side by side.
The model's size is that of the job's own model, whose shapes are built without values (and with torch), or what
``--params`` says.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.console import CommandError
from diloco.packages import require_packages
from diloco.validate import problems_text, read_job_file
from diloco_protocol.arrays.layout import ELEMENTS_PER_FRAGMENT
from diloco_protocol.bandwidth import links
from diloco_protocol.bandwidth import model as bandwidth
from diloco_protocol.bandwidth.hub import hub_needs, hub_shortage
from diloco_protocol.bandwidth.links import Need, Traffic
from diloco_protocol.bandwidth.model import Turn
from diloco_protocol.common.format_units import bits_text, seconds_text, size_text
from diloco_protocol.merging import UNMEASURED, is_unmeasured
from diloco_protocol.resources import even_sizes, find_shortages, learner_needs, needs, shard_memory, syncer_pod_memory
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBgGtT]?)")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MOST_PARAMETERS = 10**15
EXCHANGE_TRIPS = 2.5  # round trips of an exchange: pull, push, announcement, and a version that is asked for and sent
ROWS = (("up", links.UP), ("down", links.DOWN))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the job file does not say: seconds, and the share of a learner's time that is to be compute."""

    step_seconds: float
    round_trip_seconds: float = 0.0
    utilisation: float = bandwidth.UTILISATION

    def check(self) -> None:
        """Raises CommandError."""
        if not (math.isfinite(self.step_seconds) and 0 < self.step_seconds <= 1e6):
            raise CommandError(
                f"--step-seconds {self.step_seconds:g}: give the seconds of one inner step, such as 0.8; "
                "`diloco status` shows them of a job that runs (s/step)"
            )
        if not 0 <= self.round_trip_seconds <= 60:
            raise CommandError(f"--round-trip-seconds {self.round_trip_seconds:g}: give 0 to 60, such as 0.08")
        if not 0.5 <= self.utilisation <= 0.999:
            raise CommandError(f"--utilisation {self.utilisation:g}: give 0.5 to 0.999; 0.95 is usual")


def parameters_from(text: str) -> int:
    """``5e9``, ``5B``, ``350M``, ``1200000``. Raises CommandError."""
    match = _NUMBER.fullmatch(text.strip())
    count = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 <= count <= MOST_PARAMETERS:
        raise CommandError(f"--params {text}: give the number of trained parameters, such as 5e9, 5B or 350M")
    return count


def plan(path: Path, overrides: Iterable[str], parameters: str | None, conditions: Conditions) -> dict[str, Any]:
    """The plan of the job in the file, as ``--json`` prints it. Raises CommandError."""
    conditions.check()
    count = None if parameters is None else parameters_from(parameters)
    job = read_job_file(path, overrides)
    sizes, note = fragment_sizes(job, count, path.resolve().parent)
    return document(job, sizes, note, conditions)


def fragment_sizes(job: DiLoCoJob, parameters: int | None, directory: Path) -> tuple[list[int], str]:
    """Elements of each fragment, and what was lowered and why."""
    sync = job.spec.sync
    if parameters is not None:
        fragments = max(1, min(sync.fragments, parameters // ELEMENTS_PER_FRAGMENT))
        note = "" if fragments == sync.fragments else f"fragments lowered from {sync.fragments} to {fragments}"
        return even_sizes(parameters, fragments), note
    if job.spec.training.model is None:
        raise CommandError(
            "the job has no training.model (its learners run a program of their own), so its size is not "
            "known: give --params, the number of trained parameters, such as --params 350M"
        )
    require_packages("diloco plan without --params", ["worker"])
    from diloco_worker.fragments import build_layout
    from diloco_worker.settings import ConfigurationError
    from diloco_worker.training.models import outline

    try:
        model = outline(job.spec, directory=directory)
        layout = build_layout(model, sync.fragments, sync.every, sync.merge.mean_tensors)
    except ConfigurationError as error:
        raise CommandError(str(error)) from error
    except JobError as error:  # the model's own configuration
        raise CommandError(problems_text(error)) from error
    return [layout.elements(p) for p in range(len(layout))], layout.note


def document(job: DiLoCoJob, sizes: Sequence[int], note: str, conditions: Conditions) -> dict[str, Any]:
    """Everything that is known, in bytes, bits per second and seconds; null: no bandwidth is enough. Of regions with
    ``maxLearners`` it is what so many need."""
    spec, sync = job.spec, job.spec.sync
    learners = spec.most_slots
    spares = sum(region.spares for region in spec.regions)
    chosen = sync.compression
    of_turn = links.turn(sync, len(sizes), conditions.step_seconds, conditions.round_trip_seconds)
    carried = links.traffic(sizes, chosen.up, chosen.down, learners)
    formula = links.need_by_formula(carried, of_turn, conditions.utilisation)
    queued = links.need_by_queue(carried, of_turn, conditions.utilisation)
    parallel = bandwidth.data_parallel(sum(sizes), learners, conditions.step_seconds, conditions.utilisation)
    per_step = {
        "up_bytes": carried.up_per_turn / sync.every + carried.report,
        "down_bytes": carried.down_per_turn / sync.every,
        "data_parallel_bytes": 2 * 2 * sum(sizes) * bandwidth.all_reduce_factor(learners),
    }
    both = per_step["up_bytes"] + per_step["down_bytes"]
    needed, hub = needs(spec, sizes), hub_needs(spec, sizes, conditions.step_seconds)
    too_small = [{"field": one.path, "message": one.message} for one in find_shortages(spec, sizes)]
    if few := hub_shortage(spec, len(sizes), hub):
        too_small.append({"field": "syncer.shards", "message": few})
    return {
        "job": job.metadata.name,
        "parameters": sum(sizes),
        "note": note,
        "learners": learners,
        "spares": spares,
        "fragments": len(sizes),
        "every": sync.every,
        "overlap": sync.overlap,
        "step_seconds": conditions.step_seconds,
        "round_trip_seconds": conditions.round_trip_seconds,
        "unmeasured": is_unmeasured(spec, sum(sizes)),
        "exchange": {
            "least_seconds": EXCHANGE_TRIPS * conditions.round_trip_seconds,
            "overlap_seconds": sync.overlap * conditions.step_seconds,
        },
        "utilisation": conditions.utilisation,
        "compression": {"up": chosen.up, "down": chosen.down},
        "merge": {"up_bytes": carried.up, "down_bytes": carried.down},
        "encodings": _encodings(job, sizes, of_turn, conditions),
        "formula": _row(formula, carried, learners, spares),
        "queued": _row(queued, carried, learners, spares),
        "data_parallel": {"bits_per_second": parallel},
        "ratio": {
            "formula": _ratio(parallel, formula.same),
            "queued": _ratio(parallel, queued.same),
            "bytes": _ratio(per_step["data_parallel_bytes"], both),
        },
        "per_step": per_step,
        "regions": [
            {
                "name": region.name,
                "learners": region.most_learners,
                "spares": region.spares,
                "up": _finite(queued.up * region.most_learners),
                "down": _finite(queued.down * (region.most_learners + region.spares)),
            }
            for region in spec.regions
        ],
        "join": _join(sizes, queued),
        "hub": {**asdict(hub), "cores": hub.cores},
        "resources": {
            "syncer_memory_bytes": syncer_pod_memory(spec, sizes),
            "shard_pods": None
            if spec.syncer.shard_pods is None
            else {"pods": spec.syncer.shards, "memory_bytes": shard_memory(spec, sizes, spec.syncer.shards)},
            "syncer_volume_bytes": needed.syncer_volume,
            "learner_memory_bytes": needed.learner_memory,
            "learners": [
                {"region": one.name, **spec.group(one.name)._asdict(), **asdict(learner_needs(spec, sizes, one.name))}
                for one in spec.regions
            ],
            "too_small": too_small,
        },
    }


def _group_text(found: Mapping[str, Any]) -> str:
    """What a learner of several ranks needs, for people."""
    pods, ranks = found["pods"], found["processes"] * found["pods"]
    others = f", each other of its {pods} pods {size_text(found['other_memory'])}" if found["other_memory"] else ""
    gpu = f"; of its GPU each rank at least {size_text(found['device_memory'])}" if found["device_memory"] else ""
    return (
        f"A learner of region {found['region']} ({ranks} ranks): at least {size_text(found['memory'])} on the host of "
        f"its leader, {size_text(found['shared_memory'])} of it in /dev/shm{others}{gpu}"
    )


def _row(need: Need, carried: Traffic, learners: int, spares: int) -> dict[str, Any]:
    return {
        "link": {"up": _finite(need.up), "down": _finite(need.down), "same": _finite(need.same)},
        "hub": {"in": _finite(learners * need.up), "out": _finite((learners + spares) * need.down)},
    }


def _encodings(
    job: DiLoCoJob, sizes: Sequence[int], of_turn: Turn, conditions: Conditions
) -> dict[str, dict[str, Any]]:
    """Per direction and encoding: bytes per merge, and what the link needs, the rest being as it is."""
    chosen = job.spec.sync.compression
    found: dict[str, dict[str, Any]] = {"up": {}, "down": {}}
    for direction, names in ROWS:
        for name in names:
            up, down = (name, chosen.down) if direction == "up" else (chosen.up, name)
            carried = links.traffic(sizes, up, down, job.spec.most_slots)
            need = links.need_by_queue(carried, of_turn, conditions.utilisation)
            found[direction][name] = {
                "bytes_per_merge": carried.up if direction == "up" else carried.down,
                "bits_per_second": _finite(need.up if direction == "up" else need.down),
            }
    return found


def _join(sizes: Sequence[int], need: Need) -> dict[str, Any]:
    """A newcomer downloads the whole model; from a peer also the inner optimizer's state (two moments)."""
    model = 4 * sum(sizes)
    seconds = 8 * links.FRAMING * 3 * model / need.down if 0 < need.down < math.inf else None
    return {"model_bytes": model, "optimizer_bytes": 2 * model, "seconds": seconds}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(over: float, under: float) -> float | None:
    return over / under if 0 < under < math.inf else None


# ------------------------------------------------------------------ for people


def text(found: dict[str, Any]) -> str:
    formula, queued = found["formula"], found["queued"]
    learners, spares = found["learners"], found["spares"]
    count = f"{found['parameters']:,}"
    lines = [
        f"{found['job']}: {learners} learner{'s' * (learners != 1)}, {count} trained parameters in "
        f"{found['fragments']} fragment{'s, each' * (found['fragments'] > 1)} merged every {found['every']} steps",
        f"  steps of {seconds_text(found['step_seconds'])}, an exchange overlaps {found['overlap']}; "
        f"learners compute {found['utilisation']:.3g} of the time"
        + (f"; round trip {seconds_text(found['round_trip_seconds'])}" * (found["round_trip_seconds"] > 0)),
        *([f"  {found['note']}"] if found["note"] else []),
        "",
        "Bytes of one merge on a learner's link (largest fragment, with headers), and what the link needs",
    ]
    for direction, names in ROWS:
        for name in names:
            row = found["encodings"][direction][name]
            mark = "  <- the job's" if found["compression"][direction] == name else ""
            lines.append(
                f"  {direction:<5} {name:<11} {size_text(row['bytes_per_merge']):>9} "
                f"{_bits(row['bits_per_second']):>16}{mark}"
            )
    several = f" ({learners} learner{'s' * (learners != 1)}"
    outs = several + (f", {spares} spare{'s' * (spares != 1)})" if spares else ")")
    rows = [
        ("learner's link, up", formula["link"]["up"], queued["link"]["up"]),
        ("learner's link, down", formula["link"]["down"], queued["link"]["down"]),
        ("  or as fast up as down", formula["link"]["same"], queued["link"]["same"]),
        ("hub, in" + several + ")", formula["hub"]["in"], queued["hub"]["in"]),
        ("hub, out" + outs, formula["hub"]["out"], queued["hub"]["out"]),
    ]
    if len(found["regions"]) > 1:
        for region in found["regions"]:
            rows += [
                (f"region {region['name']}, up ({region['learners']})", -1, region["up"]),
                (f"region {region['name']}, down ({region['learners'] + region['spares']})", -1, region["down"]),
            ]
    width = max(len(row[0]) for row in rows)
    lines += ["", f"{'Bandwidth':<{width + 2}} {'by formula':>16} {'by queue':>16}"]
    lines += [
        f"  {name:<{width}} {'' if one == -1 else _bits(one):>16} {_bits(other):>16}" for name, one, other in rows
    ]
    parallel, ratio, step = found["data_parallel"]["bits_per_second"], found["ratio"], found["per_step"]
    resources = found["resources"]
    lines += [
        f"  {'data-parallel, each way':<{width}} {bits_text(parallel):>16} {bits_text(parallel):>16}",
        f"  {'  times as much':<{width}} {_times(ratio['formula']):>16} {_times(ratio['queued']):>16}",
        "",
        f"Bytes per step and learner: {size_text(step['up_bytes'])} up, {size_text(step['down_bytes'])} "
        f"down; data-parallel {size_text(step['data_parallel_bytes'])}"
        + (f", {_times(ratio['bytes'])} times as much" if ratio["bytes"] else ""),
        f"A newcomer first downloads up to {size_text(3 * found['join']['model_bytes'])} (model and "
        "optimizer state)"
        + (f": {seconds_text(found['join']['seconds'])} at that rate" if found["join"]["seconds"] else ""),
        f"Memory: the syncer up to {size_text(resources['syncer_memory_bytes'])}, each learner at least "
        f"{size_text(resources['learner_memory_bytes'])} on the host; the syncer's volume up to "
        f"{size_text(resources['syncer_volume_bytes'])}",
        *_hub_lines(found["hub"], resources["shard_pods"]),
        *map(_group_text, (one for one in resources["learners"] if one["processes"] * one["pods"] > 1)),
        *(textwrap.fill(f"warning: {one['field']} {one['message']}", 100) for one in resources["too_small"]),
        "Size links by the queue; framing of TCP/IP and TLS is in. Below it nothing stops: merges become rarer.",
    ]
    exchange = found["exchange"]
    if exchange["least_seconds"] > exchange["overlap_seconds"]:
        overlap = math.ceil(exchange["least_seconds"] / found["step_seconds"])
        words = (
            f"An exchange takes at least {seconds_text(exchange['least_seconds'])} ({EXCHANGE_TRIPS:g} round trips). "
            f"The {found['overlap']} steps that it may overlap take {seconds_text(exchange['overlap_seconds'])}. "
            "So a merge waits for other learners for one step, and the work of much slower ones is in the merge after. "
            f"With sync.overlap {overlap} or more it waits longer."
        )
        lines.append(textwrap.fill(words, 100))
    if found["unmeasured"]:
        lines.append(textwrap.fill(UNMEASURED, 100))
    if queued["link"]["up"] is None:
        lines.append(
            "No bandwidth is enough here: the round trips take all the time that an exchange overlaps. "
            "Raise sync.overlap."
        )
    return "\n".join(lines)


def _hub_lines(hub: Mapping[str, Any], pods: Mapping[str, Any] | None) -> list[str]:
    """What the syncer needs at the job's pace, for people."""
    parts = ", ".join(f"{name}s {hub[f'{name}_cores']:.3g}" for name in ("byte", "norm", "merge"))
    of_fragments = f", of {hub['shards']} that the fragments allow" if hub["wanted"] > hub["shards"] else ""
    written = f"{size_text(hub['written'])}/s to its disk"
    memory = f"; memory {size_text(hub['memory'])}, of a shard {size_text(hub['shard_memory'])}"
    return [
        f"The hub's work, by measured costs: {hub['cores']:.3g} cores ({parts}); {written}",
        f"Shards wanted (syncer.shards): {hub['wanted']}{of_fragments}{memory * (hub['shards'] > 1)}",
    ] + ([f"Each of the {pods['pods']} shard pods: memory up to {size_text(pods['memory_bytes'])}"] if pods else [])


def _bits(value: float | None) -> str:
    return bits_text(math.inf if value is None else value)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
