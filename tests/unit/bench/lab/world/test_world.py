"""A job in virtual time, against what the rules say by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from diloco_protocol.arrays.kernels import Float32s
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import JobPhase
from diloco_worker.core.adoption import Kind
from lab.world.links import LinkRates, SimulatedLink
from lab.world.parts import CountedSteps, CountedVersions, Replica, StepOrder, StepResult
from lab.world.values import MergedVersions
from lab.world.world import World
from ledger_balance import imbalances

TOKENS = 16
LAYOUT = Layout.build([Tensor("a.weight", (40, 6), "float32"), Tensor("b.weight", (30, 8), "float32")], 4)
SIZES = [LAYOUT.elements(p) for p in range(len(LAYOUT))]


def a_job(learners: int, steps: int, most_learners: int | None = None, **sync: Any) -> DiLoCoJob:
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "simulated"},
            "spec": {
                "training": {
                    "model": {"config": {"model_type": "llama"}},
                    "data": {"source": "text", "paths": ["python-stdlib"], "sequenceLength": TOKENS},
                    "batch": {"sequences": 1},
                    "stop": {"tokens": learners * steps * TOKENS},
                },
                "sync": {"fragments": 4, "every": 8, **sync},
                "regions": [{"name": "r", "learners": learners, "maxLearners": most_learners}],
            },
        }
    )


class Regression:
    """A least-squares problem that every slot has its own rows of; plain gradient descent, in numpy."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.truth = [self.random.normal(size=n).astype(np.float32) for n in SIZES]
        self.steps_made: list[tuple[int, int]] = []

    def open_replica(self, slot: int) -> Replica:
        return Weights()

    def close_replica(self, replica: Replica) -> None:
        pass

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        for order in orders:
            assert isinstance(order.replica, Weights)
            self.steps_made.append((order.slot, order.step))
            order.replica.theta = self.stepped(order.replica.theta, order.slot, order.step)
        return [StepResult(TOKENS, 1.0)] * len(orders)

    def stepped(self, theta: list[Float32s], slot: int, step: int) -> list[Float32s]:
        """θ after one step of gradient descent on the rows of this slot and step."""
        rows = np.random.default_rng([slot, step])
        after = []
        for weights, truth in zip(theta, self.truth, strict=True):
            x = rows.normal(size=(4, weights.size)).astype(np.float32)
            after.append(weights - np.float32(0.002) * (x.T @ (x @ (weights - truth))))
        return after


class Weights:
    def __init__(self) -> None:
        self.theta: list[Float32s] = [np.zeros(n, np.float32) for n in SIZES]

    def snapshot(self, fragment: int) -> Float32s:
        return self.theta[fragment].copy()

    def move(self, fragment: int, kind: Kind, new: Float32s, reference: Float32s | None, alpha: float) -> None:
        if kind is Kind.OVERWRITE:
            self.theta[fragment] = new.copy()
        elif kind is Kind.MIX:
            self.theta[fragment] = self.theta[fragment] * np.float32(alpha) + new * np.float32(1 - alpha)
        else:
            assert reference is not None
            self.theta[fragment] = self.theta[fragment] - reference + new

    def optimizer_state(self) -> object:
        return None

    def set_optimizer_state(self, state: object) -> None:
        pass


def a_world(job: DiLoCoJob, **changes: Any) -> tuple[World, Regression, MergedVersions]:
    problem = Regression()
    versions = MergedVersions(job, LAYOUT, [np.zeros(n, np.float32) for n in SIZES])
    world = World(job, problem, versions, **changes)
    world.start_all()
    return world, problem, versions


def test_one_learner_without_compression_ends_as_plain_training_does() -> None:
    """With outer rate 1 and no momentum every merge takes over the learner's own work, and `keep` loses none."""
    plain = {
        "merge": {"method": "rda"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "compression": {"up": "float32", "down": "float32"},
    }
    world, problem, versions = a_world(a_job(1, 60, **plain))
    assert world.run(until=1000)
    theta = Weights().theta
    for step in range(61):  # the word of the stop comes in the middle of one more
        theta = problem.stepped(theta, 0, step)
    assert problem.steps_made == [(0, step) for step in range(61)]
    for fragment, expected in enumerate(theta):
        np.testing.assert_allclose(versions.theta(fragment), expected, rtol=0, atol=1e-6)


def test_one_fragment_of_one_learner_is_stepped_as_the_outer_step_says() -> None:
    """Momentum too: the versions are those of a loop that does by hand what one process with an outer step does."""
    layout = Layout.build([Tensor("a.weight", (40, 6), "float32")], 1)
    job = a_job(
        1, 33, fragments=1, overlap=1, merge={"method": "rda"}, compression={"up": "float32", "down": "float32"}
    )
    problem = Regression()
    problem.truth = [np.concatenate(problem.truth)[:240]]
    versions = MergedVersions(job, layout, [np.zeros(240, np.float32)])
    world = World(job, OneTensor(problem), versions)
    world.start_all()
    assert world.run(until=1000)

    base, theta, momentum = np.zeros(240), np.zeros(240, np.float32), np.zeros(240)
    snapshot, taken = theta, 0
    for step in range(34):
        theta = problem.stepped([theta], 0, step)[0]
        if taken and step + 1 == taken + 1:  # the version arrives one step after the snapshot
            delta = base - snapshot
            momentum = 0.9 * momentum + delta
            base = base - 0.7 * (delta + 0.9 * momentum)
            theta = (base + (theta - snapshot)).astype(np.float32)
        # H steps after the last snapshot the round is due; the pull comes within the next step.
        if (step + 1) % 9 == 0 if not taken else step + 1 == taken + 9:
            snapshot, taken = theta.copy(), step + 1
    delta = base - theta  # the drain
    momentum = 0.9 * momentum + delta
    base = base - 0.7 * (delta + 0.9 * momentum)
    assert world.core.versions == [4]
    np.testing.assert_allclose(versions.theta(0), base, rtol=0, atol=1e-5)


class OneTensor(Regression):
    """The same problem in one fragment."""

    def __init__(self, problem: Regression) -> None:
        super().__init__()
        self.truth = problem.truth

    def open_replica(self, slot: int) -> Replica:
        weights = Weights()
        weights.theta = [np.zeros(240, np.float32)]
        return weights


@pytest.mark.parametrize("rule", ["keep", "overwrite", "mix"])
def test_two_runs_are_the_same_bit_for_bit(rule: str) -> None:
    ends = []
    for _ in range(2):
        job = a_job(3, 50, quorum=2, adoption={"rule": rule}, compression={"up": "int4", "errorFeedback": True})
        world, _, versions = a_world(job, pace=lambda place: 1.0 + 0.25 * place[1])
        world.timeline.call_at(20.0, lambda world=world: world.kill_learner(("r", 1)))
        world.timeline.call_at(26.0, lambda world=world: world.start_learner(("r", 1)))
        assert world.run(until=1000)
        ends.append((world.now, [versions.theta(p).tobytes() for p in range(4)], dict(world.seen)))
    assert ends[0] == ends[1]


def test_a_dead_learner_does_not_stop_the_others_and_its_slot_goes_on() -> None:
    world, problem, _ = a_world(a_job(3, 100))
    world.timeline.call_at(30.5, lambda: world.kill_learner(("r", 2), told=False))
    world.run(until=45.0)
    merges = world.seen["merges"]
    assert max(step for slot, step in problem.steps_made if slot == 2) == 29
    assert world.core.phase is JobPhase.TRAINING
    world.run(until=60.0)
    assert world.seen["merges"] > merges
    world.start_learner(("r", 2))
    assert world.run(until=1000)
    assert world.core.phase is JobPhase.COMPLETE
    assert sum(slot == 2 for slot, _ in problem.steps_made) > 60
    assert world.core.ledger is not None and imbalances(world.core.ledger) == []
    assert world.core.trained_tokens >= 300 * TOKENS
    assert world.core.ledger.totals().dropped > 0  # what it had above its bases when it died


def test_without_faults_every_token_is_merged() -> None:
    world, _, _ = a_world(a_job(4, 70))
    assert world.run(until=1000)
    assert world.core.ledger is not None
    totals = world.core.ledger.totals()
    assert totals.merged == 4 * 71 * TOKENS and totals.dropped == totals.pending == 0
    # Four merges of each fragment a turn, everybody in each, and one more of each at the end.
    assert world.seen["merged pushes"] == 4 * world.seen["merges"]


def test_a_stalled_learner_makes_its_steps_later_and_a_cut_one_comes_back_with_its_work() -> None:
    world, problem, _ = a_world(a_job(2, 60))
    world.timeline.call_at(10.5, lambda: world.stall_learner(("r", 0), 7.0))
    world.timeline.call_at(20.5, lambda: world.cut_learner(("r", 1), 5.0))
    world.run(until=30.05 + 0.5)
    assert max(step for slot, step in problem.steps_made if slot == 0) == 22  # seven fewer
    assert max(step for slot, step in problem.steps_made if slot == 1) == 29
    assert world.run(until=1000)
    assert world.core.ledger is not None and world.core.ledger.totals().dropped == 0


def test_a_learner_beyond_the_places_trains_at_once_and_leaves_with_all_its_work_merged() -> None:
    world, problem, _ = a_world(a_job(2, 90, most_learners=3))
    world.timeline.call_at(30.5, lambda: world.start_learner(("r", 2)))
    world.timeline.call_at(60.5, lambda: world.drain_learner(("r", 2)))
    assert world.run(until=1000)
    steps = [step for slot, step in problem.steps_made if slot == 2]
    assert steps[0] >= 29, "its slot begins where the others are"
    assert 28 <= len(steps) <= 30
    assert world.core.ledger is not None and imbalances(world.core.ledger) == []
    totals = world.core.ledger.totals()
    assert totals.merged == totals.trained == len(problem.steps_made) * TOKENS
    assert world.seen["merged pushes"] > 2 * world.seen["merges"]


def test_a_newcomer_has_every_fragment_soon_whenever_it_comes() -> None:
    """What is announced between its Join and its Admit is not missing, nor what was on its way to it as a standby."""
    for at in np.arange(30.0, 34.0, 0.1):
        latency = 0.36
        world, problem, _ = a_world(a_job(2, 60, most_learners=3), link=LinkRates(latency=latency))
        world.timeline.call_at(at, lambda world=world: world.start_learner(("r", 2)))
        world.run(until=at + 1.0 + 12 * latency)
        assert any(slot == 2 for slot, _ in problem.steps_made), at


def test_many_learners_without_values_train_in_virtual_time() -> None:
    job = a_job(60, 12)
    world = World(job, CountedSteps(TOKENS), CountedVersions(job, SIZES))
    world.start_all()
    assert world.run(until=1000)
    assert world.core.ledger is not None
    assert world.core.ledger.totals().merged == world.core.trained_tokens == 60 * 13 * TOKENS


def test_a_payload_waits_for_what_its_link_carries_already() -> None:
    link = SimulatedLink(LinkRates(latency=0.5, up=100.0, down=50.0))
    assert link.send_up(1.0, 200) == 3.5
    assert link.send_up(1.5, 100) == 4.5
    assert link.send_down(0.0, 100) == 3.0
    assert (link.bytes_up, link.bytes_down) == (300, 100)
