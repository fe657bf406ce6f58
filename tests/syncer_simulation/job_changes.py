"""What is drawn of a job beside its mishaps: what people change while it runs, and pushes that have come apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig

MEAN_TOKENS = 36  # of a step
MEAN_STEP_SECONDS = 0.125
CHANGES = ("quorum", "grace", "turn", "versions", "gate", "stop")


def change_config(config: CoreConfig, chance: random.Random) -> CoreConfig:
    """The job after an edit of one or two of the fields that may change at any time."""
    for what in chance.sample(CHANGES, chance.randint(1, 2)):
        rules = config.rules
        match what:
            case "quorum":
                config = replace(config, rules=replace(rules, quorum=chance.randint(1, len(config.places))))
            case "grace":
                cap = chance.choice([0.0, 0.5, 2.0, 10.0])
                config = replace(config, rules=replace(rules, grace_factor=chance.choice([0.0, 0.9]), grace_cap=cap))
            case "turn":
                every = chance.randint(4, 8)
                config = replace(config, rules=replace(rules, every=every, overlap=chance.randint(0, 3)))
            case "versions":
                config = replace(config, max_versions=chance.choice([2, 4, 16]))
            case "gate":
                config = replace(config, norm_gate=chance.choice([None, 3.0, 10.0]))
            case "stop":
                kind, limit = config.stop
                config = replace(config, stop=(kind, limit * chance.choice([0.5, 0.8, 1.3])))
    return config


def draw_norm(steps: int, diverged: float, chance: random.Random) -> tuple[float, float]:
    """The norm of a push of so many steps, and its growth: steps point anywhere, so that norms grow as the root of
    their number, and some pushes have come apart."""
    usual = math.sqrt(steps)
    if chance.random() >= diverged:
        return usual, 0.1
    return chance.choice([(math.nan, 0.1), (math.inf, 0.1), (100.0 * usual, 0.1), (1000.0 * usual, 100.0)])


def is_of_a_lost_region(action: ev.SetPhase) -> bool:
    """Whether the job fails because a region is lost, after which people start it again."""
    return action.phase is JobPhase.FAILED and "onRegionLost is Fail" in action.message
