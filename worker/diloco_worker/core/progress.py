"""How far the job is on its way to its stop, as one learner knows it; what schedules run on.

The syncer says with each version how much of ``training.stop`` the job had reached then, by whichever of steps, tokens
and seconds it stops. That is the whole job's course, not the slot's share of it: where some learners are faster, or
never came, a slot's own count says nothing of when the job ends.

Between two versions a learner knows its own steps and tokens, which are the least that the job has.

In deterministic mode progress is the slot's share alone, because every slot stops by its own count there, and when a
version is heard of depends on the network.
"""

from __future__ import annotations

from diloco_protocol.spec.job_spec import JobSpec


def job_progress(spec: JobSpec, learners: int, step: int, tokens: int, heard: float) -> float:
    """0 to 1 of ``training.stop``. ``step`` and ``tokens`` are the slot's; ``heard`` is the newest that the syncer
    said; ``learners``: slots of the job."""
    stop = spec.training.stop
    if spec.sync.deterministic:
        own = step if stop.kind == "steps" else tokens * learners
        return min(1.0, own / stop.limit)
    own = {"steps": step, "tokens": tokens, "seconds": 0}[stop.kind]
    return min(1.0, max(heard, own / stop.limit))


def schedule_step(spec: JobSpec, step: int, progress: float, total: int | None) -> float:
    """How far a schedule of ``total`` steps is, in steps: the job's ``progress`` of them.

    In deterministic mode it is the slot's step itself, which is the same without rounding; also where ``total`` is not
    known (None)."""
    return step if spec.sync.deterministic or total is None else progress * total
