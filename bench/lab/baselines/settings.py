"""What a process of a baseline is told, by one variable of its environment. Nothing here loads torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "DILOCO_BASELINE"


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """One process of a baseline.

    ``program``: ``rank`` (one rank of torch DDP), ``agent`` and ``store`` (elastic DDP's), ``replica`` and
    ``lighthouse`` (torchft's), ``score`` (the loss of what was kept) or ``calibrate`` (how long a step computes).
    ``directory``: the arm's. ``memory``: a folder on a memory file system, for checkpoints and the states to score.
    ``learner``: index of the machine. ``stop_seconds``: from the first step to the end. ``score_tokens``: between two
    states that are scored. ``mtbf_seconds``: mean time between two faults of the whole job that end a process.
    ``store``: host:port.
    """

    program: str
    directory: str
    memory: str = ""
    learner: int = 0
    learners: int = 1
    stop_seconds: float = 0.0
    score_tokens: int = 1
    mtbf_seconds: float = math.inf
    store: str = ""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_json(cls, text: str) -> BaselineSettings:
        return cls(**json.loads(text))

    @property
    def started(self) -> Path:
        """Holds when the job's first step began, Unix seconds."""
        return Path(self.directory) / "started.json"

    @property
    def ended(self) -> Path:
        """There once the job has trained its time."""
        return Path(self.directory) / "ended.json"

    @property
    def scores(self) -> Path:
        return Path(self.directory) / "scores.json"

    @property
    def calibration(self) -> Path:
        return Path(self.directory) / "calibration.json"

    @property
    def store_address(self) -> Path:
        return Path(self.directory) / "store.json"

    @property
    def group(self) -> Path:
        """Names the ranks that formed last: an older group's stop."""
        return Path(self.directory) / "group.json"

    def steps(self, learner: int) -> Path:
        """A line for each step that a rank on this machine made."""
        return Path(self.directory) / f"steps-{learner}.jsonl"

    def cut(self, learner: int) -> Path:
        """Holds until when this machine has no connection, Unix seconds."""
        return Path(self.directory) / f"cut-{learner}.json"


def daly_interval(cost: float, mtbf: float) -> float:
    """Seconds of work between two checkpoints that lose least, by Daly's higher-order estimate (Future Generation
    Computer Systems 22, 2006). ``cost``: seconds of one checkpoint; ``mtbf``: mean seconds between failures of the
    whole job, may be infinite."""
    if math.isinf(mtbf):
        return math.inf
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
