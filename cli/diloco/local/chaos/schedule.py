"""What shall break, and when: the ``--chaos`` schedule.

A schedule is a list of faults, separated by commas; each is ``TIME:ACTION:TARGET[:DURATION]``:

* TIME is a duration since the job's first merge (``20s``, ``1.5m``) or a step
  (``step=150``: when the job's greatest slot step gets there).
* ACTION is ``kill`` (SIGKILL; with a DURATION, its machine's repair, it is started again no sooner than that), ``term``
  (SIGTERM: the learner drains), ``pause`` (SIGSTOP, and SIGCONT after DURATION), ``cut`` (its connections are dropped
  and refused for DURATION) or ``slow`` (it has half its speed for DURATION; ``slow(0.2)``: a fifth).
* TARGET is ``local-2`` (a learner by its name, REGION-ORDINAL), ``learner-2`` (by its number over all regions),
  ``learner`` (any running one, chosen by the run's seed) or ``syncer``.

Everything here is plain code: the runner asks which faults are due, chooses the process, and carries the fault out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

ACTIONS = ("kill", "term", "pause", "cut", "slow")
LASTING = ("pause", "cut", "slow")  # these need a DURATION
GRAMMAR = "TIME:ACTION:TARGET[:DURATION], as in 20s:kill:local-2 or step=150:pause:learner:5s"
NONE = "none"  # a schedule without faults, in words
MAX_FAULTS = 10_000
NAMED = 8  # learners that an error lists

# At most 9 digits: what nobody means is refused here, not where a float or a timer ends.
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = re.compile(r"step=([0-9]{1,9})")
_LEARNER = re.compile(r"learner(?:-([0-9]{1,9}))?")
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,18}[a-z0-9])?-[0-9]{1,9}")
_ACTION = re.compile(r"([a-z]+)(?:\((.*)\))?")
_SPEED = re.compile(r"0\.[0-9]{1,3}")
HALF_SPEED = 0.5


class ChaosError(ValueError):
    """A schedule that cannot be read; the message names the item and the cure."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to break. Exactly one of ``after_seconds`` and ``at_step`` is set.

    ``learner`` is the target's index over all learners of the job, or None for any running one; it means nothing when
    ``syncer`` is set. ``name``: the target's REGION-ORDINAL, empty where the schedule does not say it and ``check`` has
    not found it yet. ``duration`` is in seconds and 0 for actions that do not last; a kill's is how long the process
    stays away at least. ``speed``: the share of its speed that ``slow`` leaves, above 0 and below 1.
    """

    text: str
    action: str
    after_seconds: float | None = None
    at_step: int | None = None
    syncer: bool = False
    learner: int | None = None
    duration: float = 0.0
    speed: float = HALF_SPEED
    name: str = ""

    @property
    def target(self) -> str:
        if self.syncer:
            return "syncer"
        if self.name:
            return self.name
        return "learner" if self.learner is None else f"learner-{self.learner}"


def parse(spec: str) -> tuple[Fault, ...]:
    """Read a schedule. Raises ChaosError; an empty or blank ``spec``, and ``NONE``, have no fault."""
    if spec.strip() in ("", NONE):
        return ()
    items = spec.split(",")
    if len(items) > MAX_FAULTS:
        raise ChaosError(f"--chaos has {len(items)} items; at most {MAX_FAULTS} are taken")
    return tuple(_item(item.strip(), index) for index, item in enumerate(items, start=1))


def check(schedule: Sequence[Fault], names: Sequence[str]) -> tuple[Fault, ...]:
    """The schedule with each named learner's index and name. ``names``: of the job's learners, in the job's order.
    Raises ChaosError where it names one that the job does not have."""
    return tuple(_found(fault, index, names) for index, fault in enumerate(schedule, start=1))


def _found(fault: Fault, index: int, names: Sequence[str]) -> Fault:
    if fault.syncer or (fault.learner is None and not fault.name):
        return fault
    counted = f"learner-{fault.learner}"
    if fault.name in names or counted in names:  # a region may be called learner
        name = fault.name or counted
        return replace(fault, learner=names.index(name), name=name)
    if fault.learner is not None and fault.learner < len(names):
        return replace(fault, name=names[fault.learner])
    known = f"only {names[0]}" if len(names) == 1 else f"{', '.join(names[:NAMED])}{', …' * (len(names) > NAMED)}"
    raise _error(index, fault.text, f"the job has no {fault.target}; it has {known}")


def choose(fault: Fault, index: int, running: Sequence[int], seed: int) -> int | None:
    """The learner (index over all of the job) that fault number ``index`` hits, or None
    where no such learner is running. The same seed, index and set give the same answer."""
    if fault.learner is not None:
        return fault.learner if fault.learner in running else None
    if not running:
        return None
    return random.Random(f"chaos/{seed}/{index}").choice(sorted(running))


class FaultSchedule:
    """Says which faults of a schedule are due; each is given out once, in time's order."""

    def __init__(self, schedule: Sequence[Fault]) -> None:
        self._waiting = list(enumerate(schedule))

    @property
    def waiting(self) -> tuple[Fault, ...]:
        return tuple(fault for _, fault in self._waiting)

    def due(self, since_first_merge: float | None, greatest_step: int) -> list[tuple[int, Fault]]:
        """(index in the schedule, fault) of those that are due now. Before the first merge
        ``since_first_merge`` (seconds) is None and only steps count."""

        def ripe(fault: Fault) -> bool:
            if fault.at_step is not None:
                return greatest_step >= fault.at_step
            assert fault.after_seconds is not None
            return since_first_merge is not None and since_first_merge >= fault.after_seconds

        ripe_now = [(index, fault) for index, fault in self._waiting if ripe(fault)]
        self._waiting = [(index, fault) for index, fault in self._waiting if not ripe(fault)]
        return sorted(ripe_now, key=lambda pair: (pair[1].after_seconds or 0.0, pair[1].at_step or 0, pair[0]))


# ------------------------------------------------------------------ reading


def _error(index: int, item: str, message: str) -> ChaosError:
    return ChaosError(f"--chaos item {index} ({item!r}): {message}")


def _item(item: str, index: int) -> Fault:
    if not item:
        raise _error(index, item, f"it is empty; remove the spare comma, or write {GRAMMAR}")
    parts = [part.strip() for part in item.split(":")]
    if not 3 <= len(parts) <= 4:
        raise _error(index, item, f"it has {len(parts)} part{'s' * (len(parts) != 1)}; write {GRAMMAR}")
    time, action, target = parts[:3]
    action, speed = _action(action, item, index)
    after_seconds, at_step = _time(time, item, index)
    named = _LEARNER.fullmatch(target)
    if target != "syncer" and named is None and _NAME.fullmatch(target) is None:
        cure = "write a learner's name such as local-1, learner (any) or syncer"
        raise _error(index, item, f"there is no target {target!r}; {cure}")
    duration = 0.0
    if action in LASTING:
        if len(parts) == 3:
            raise _error(index, item, f"{action} needs a duration; write {time}:{action}:{target}:5s")
        duration = _seconds(parts[3])
        if duration <= 0:
            raise _error(index, item, f"{parts[3]!r} is no duration above zero; write 5s, 500ms or 2m")
    elif len(parts) == 4 and action == "kill":
        duration = _seconds(parts[3])
        if not duration > 0:
            raise _error(index, item, f"{parts[3]!r} is no time that it stays away; write 30s, or leave it out")
    elif len(parts) == 4:
        raise _error(index, item, f"{action} takes no duration; write {time}:{action}:{target}")
    learner = int(named[1]) if named is not None and named[1] is not None else None
    name = target if named is None and target != "syncer" else ""
    return Fault(
        item,
        action,
        after_seconds,
        at_step,
        syncer=target == "syncer",
        learner=learner,
        duration=duration,
        speed=speed,
        name=name,
    )


def _action(text: str, item: str, index: int) -> tuple[str, float]:
    """The action, and the speed that ``slow`` leaves."""
    read = _ACTION.fullmatch(text)
    if read is None or read[1] not in ACTIONS:
        raise _error(index, item, f"there is no action {text!r}; write one of {', '.join(ACTIONS)}")
    action, argument = read[1], read[2]
    if argument is None:
        return action, HALF_SPEED
    if action != "slow" or not _SPEED.fullmatch(argument) or float(argument) == 0:
        cure = "slow alone takes one: the share of its speed that is left, such as slow(0.25)"
        raise _error(index, item, f"{argument!r} is no argument of {action}; {cure}")
    return action, float(argument)


def _time(text: str, item: str, index: int) -> tuple[float | None, int | None]:
    step = _STEP.fullmatch(text)
    if step is not None:
        return None, int(step[1])
    seconds = _seconds(text)
    if seconds < 0:
        cure = "write a duration from the first merge such as 20s, or a step such as step=150"
        raise _error(index, item, f"{text!r} is no time; {cure}")
    return seconds, None


def _seconds(text: str) -> float:
    """Seconds, or -1 where ``text`` is no duration."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNIT_SECONDS[match[2]] if match else -1.0
