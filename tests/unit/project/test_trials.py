"""The parts of bench/quality.py and bench/ablations.py: what is not the product's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_protocol.merging import choose_merge, outer_settings
from diloco_protocol.spec.sync import OuterSpec
from diloco_syncer.numerics import isotropic, outer
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import ablations
import quality
from trials import broken, fleet, outers, sparse, tasks
from trials.cells import PUBLISHED, RESULTS, Cache, Trial, common_losses, run_trial
from trials.search import INNER_RATES, best_rate, of_seeds, tuned
from trials.tables import excess, make_row, mean

RANDOM = np.random.default_rng(3)
GRADIENTS = [RANDOM.normal(size=50).astype(np.float32) for _ in range(12)]


def stepped(optimizer: outer.Outer | None, count: int) -> np.ndarray:
    """Θ after the first ``count`` merges from zero."""
    assert optimizer is not None
    theta, state = np.zeros(50, np.float32), {}
    for delta in GRADIENTS[:count]:
        state = optimizer.step(theta, delta.copy(), state)
    return theta


def by_name(name: str, merges: int = 100, **settings: float) -> outer.Outer | None:
    return outers.make({"name": name, "lr": 0.5, "momentum": 0.9, **settings}, merges)


def of_job(**settings: Any) -> outer.Outer:
    return outer.make(outer_settings(OuterSpec(**settings), "rda"))


def test_candidates_are_what_they_say_in_cases_that_others_know() -> None:
    plain = of_job(optimizer="sgd", lr=0.5)
    for first in ("warm-up", "corrected"):
        np.testing.assert_allclose(stepped(by_name(first), 1), stepped(plain, 1), rtol=1e-5)
    # Without momentum all are plain; delayed puts a gradient's step off, and forgets none.
    for name in ("heavy-ball", "warm-up", "corrected"):
        np.testing.assert_allclose(stepped(by_name(name, momentum=0.0), 12), stepped(plain, 12), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stepped(by_name("horizon", merges=10), 10), stepped(plain, 10), rtol=1e-5)
    # A long job's momentum is the limit, at the rate that its steps have in the long run.
    long = of_job(optimizer="nesterov", lr=0.05, momentum=0.9)
    np.testing.assert_allclose(stepped(by_name("horizon", merges=1000), 12), stepped(long, 12), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        stepped(by_name("delayed", momentum=0.0), 12), stepped(of_job(optimizer="sgd", lr=0.125), 12), rtol=1e-4
    )


def test_isolocos_merge_is_the_products_at_another_length() -> None:
    matrix = RANDOM.normal(size=(8, 20)).astype(np.float32)
    found, product = outers.equalize_to_mean(matrix), matrix.copy().ravel()
    isotropic.equalize_singular_values(product, [isotropic.Span(0, 8, 20)])
    values = np.linalg.svd(matrix, compute_uv=False)
    scale = values.mean() / np.sqrt((values**2).mean())
    np.testing.assert_allclose(found, scale * product.reshape(8, 20), rtol=1e-4, atol=1e-6)
    assert np.allclose(np.linalg.svd(found, compute_uv=False), values.mean(), rtol=1e-4)


def test_heavy_ball_is_torchs_momentum() -> None:
    b = theta = np.zeros(50)
    for delta in GRADIENTS:
        b = 0.9 * b + delta
        theta = theta - 0.5 * b
    np.testing.assert_allclose(stepped(by_name("heavy-ball"), 12), theta, rtol=1e-4, atol=1e-5)


def test_a_gradient_across_the_momentum_is_turned_and_one_against_it_shortened() -> None:
    momentum = np.array([1.0, 0.0, 0.0], np.float32)
    aligned = np.array([1.0, 2.0, 0.0], np.float32)
    assert outers.turn_delta(aligned, momentum) is aligned
    assert outers.turn_delta(aligned, 0 * momentum) is aligned  # there is no momentum yet
    across = np.array([0.1, 1.0, 0.0], np.float32)
    turned = outers.turn_delta(across, momentum)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(across), rel=1e-5)
    assert turned[0] > across[0] and turned[1] > 0
    against = np.array([-1.0, 1.0, 0.0], np.float32)
    shortened = outers.turn_delta(against, momentum)
    # c = -1/√2, f = √2/(√2 + 3): the share 0.5·(-c)·f of the component -1 is gone.
    share = 0.5 / 2**0.5 * 2**0.5 / (2**0.5 + 3)
    np.testing.assert_allclose(shortened, [-1 + share, 1, 0], rtol=1e-5)


@pytest.mark.parametrize("fault", broken.FAULTS)
def test_only_the_first_learner_is_broken_and_only_as_said(fault: str) -> None:
    make, values = broken.first_is_broken(fault), RANDOM.normal(size=256).astype(np.float32)
    first, other = (make(None, 1, "float32", False) for _ in range(2))  # type: ignore[arg-type]
    assert isinstance(first, broken.BrokenValues) and not isinstance(other, broken.BrokenValues)
    sent = broken.FAULTS[fault](values, 0, np.ones_like(values))
    cosine = float(sent.astype(np.float64) @ values) / float(np.linalg.norm(sent.astype(np.float64)))
    aligned = {"its work", "× 10", "× 100", "× 1e-6"}
    assert (cosine / float(np.linalg.norm(values)) > 0.999) == (fault in aligned)
    assert (fault == "noise of the same norm") <= np.isclose(
        np.linalg.norm(sent.astype(np.float64)), np.linalg.norm(values)
    )


def test_a_sparse_push_has_the_largest_values_of_each_chunk_at_two_magnitudes() -> None:
    values = RANDOM.normal(size=2 * sparse.CHUNK + 640).astype(np.float32)
    sent = sparse.make_sparse(values)
    for start, count in ((0, 64), (sparse.CHUNK, 64), (2 * sparse.CHUNK, 10)):
        chunk, of_chunk = values[start : start + sparse.CHUNK], sent[start : start + sparse.CHUNK]
        chosen = np.flatnonzero(of_chunk)
        assert len(chosen) == count
        assert np.abs(chunk[chosen]).min() >= np.abs(np.delete(chunk, chosen)).max()
        assert len(np.unique(np.abs(of_chunk[chosen]))) == 2
        np.testing.assert_array_equal(np.sign(of_chunk[chosen]), np.sign(chunk[chosen]))
        assert np.abs(of_chunk).sum() == pytest.approx(np.abs(chunk[chosen]).sum(), rel=1e-4)


@pytest.mark.slow
def test_one_learner_without_compression_trains_as_the_reference_does() -> None:
    base = Trial("dense", "small", 1, 0)
    sync = {
        "merge": {"method": "rda"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "compression": {"up": "float32", "down": "float32"},
    }
    alone, learner = run_trial(base), run_trial(replace(base, learners=1, sync=sync))
    assert learner["loss"] == pytest.approx(alone["loss"], abs=1e-4)
    assert learner["merged"] == 1.0


@pytest.mark.slow
def test_learners_with_unequal_parts_train_the_steps_sequences() -> None:
    """Each trains its own; equal parts are what a trial has that names none."""
    base = Trial("dense", "small", 1, 0, learners=2)
    equal, unequal = run_trial(replace(base, parts=(8, 8))), run_trial(replace(base, parts=(12, 4)))
    assert equal["loss"] == run_trial(base)["loss"]
    assert unequal["loss"] == pytest.approx(equal["loss"], abs=0.1) and unequal["loss"] != equal["loss"]
    assert unequal["steps"] == equal["steps"], "as many tokens in as many seconds"


def test_every_sequence_is_trained_once_whoever_is_there() -> None:
    parts, total, visitors = (8, 4, 2, 2), 30, 3
    own = [(slot, step) for slot in range(4) for step in range(total)]
    theirs = [(slot, step) for slot in range(4, 4 + visitors) for step in range(10, 20)]

    def sequences(places: list[tuple[int, int]]) -> list[int]:
        found = []
        for slot, step in places:
            first = fleet.first_sequence(parts, total, slot, step)
            found += range(first, first + (*parts, 2, 2, 2)[slot])
        return found

    assert sorted(sequences(own)) == list(range(total * tasks.SEQUENCES))
    assert len(set(sequences(own + theirs))) == total * tasks.SEQUENCES + visitors * 10 * 2


@pytest.mark.slow
def test_visitors_take_part_for_a_third_of_the_time() -> None:
    base = Trial("dense", "small", 2, 0, learners=2, timed=True)
    alone, visited = run_trial(base), run_trial(replace(base, visitors=2))
    assert visited["steps"] == alone["steps"], "both end at the same time"
    assert alone["responders"] == 2 < visited["responders"]
    assert visited["merged"] == 1.0, "who leaves offers the work first"


def test_a_result_is_found_by_all_that_makes_it(tmp_path: Path) -> None:
    trial, cache = Trial("dense", "small", 6, 0, learners=4), Cache(tmp_path / "trials.jsonl")
    assert cache.find(trial) is None
    cache.put(trial, {"loss": 2.0})
    assert cache.find(trial) == {"loss": 2.0}
    changes: list[dict[str, Any]] = [
        {"kind": "moe"},
        {"size": "large"},
        {"merges": 40},
        {"seed": 1},
        {"learners": 2},
        {"sync": {"quorum": 2}},
        {"outer": {"name": "warm-up", "lr": 0.4}},
        {"exchange": 0.5},
        {"throttled": True},
        {"pace": (1.0, 2.0)},
        {"parts": (8, 4, 2, 2)},
        {"deaths": True},
        {"timed": True},
        {"visitors": 1},
        {"rate": 1e-3},
        {"inner": "muon"},
        {"sparse": True},
        {"broken": "× 10"},
        {"ddp": True},
        {"published": True},
    ]
    assert {name for change in changes for name in change} == set(Trial.__dataclass_fields__)
    assert all(cache.find(replace(trial, **change)) is None for change in changes)
    # What is told and what holds anyway make one trial; of the reference only what is trained counts.
    assert cache.find(replace(trial, sync={"every": 24})) == {"loss": 2.0}
    alone = Trial("dense", "small", 6, 0)
    assert alone.digest == replace(alone, sync={"quorum": 2}).digest != replace(alone, rate=1e-3).digest


def test_a_trial_on_a_gpu_is_found_whatever_torch_made_it_and_says_that_it_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = Trial("dense", "small", 6, 0), Trial("dense", "gpu", 6, 0)
    before = here.digest, there.digest
    monkeypatch.setattr("trials.cells.version", lambda package: "0.1")
    assert replace(here).digest != before[0] and replace(there).digest == before[1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="dense-gpu, 6 merges, seed 0, data-parallel is trained on a GPU"):
        run_trial(there)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--kinds", "moe"], "add dense to --kinds"), ([], "torch finds none: --show prints what is known")],
)
def test_the_size_of_gpus_is_refused_in_words(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        quality.parse(["--sizes", "gpu", *words])
    assert refused.value.code == 2 and said in capsys.readouterr().err
    assert quality.parse(["--sizes", "gpu", "--show"]).show


@pytest.mark.slow
def test_the_task_of_gpus_learns_in_steps_of_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow model of it, on a CPU: what differs is the width and the device."""
    task = tasks.TASKS["dense", "gpu"]
    config = {**task.config, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setitem(tasks.TASKS, ("dense", "gpu"), replace(task, config=config, device="cpu"))
    result = run_trial(Trial("dense", "gpu", 1, 0, learners=2))
    assert result["loss"] < 5 and result["merged"] == 1.0
    assert task.equal_parts(2) == (16, 16) and "device" not in result


def test_results_are_those_of_whole_lines_whoever_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "results" / "trials.jsonl"
    first, second = Trial("dense", "small", 6, 0), Trial("moe", "small", 6, 0)
    cache, other = Cache(path), Cache(path)
    cache.put(first, {"loss": 2.0})
    assert other.find(first) == {"loss": 2.0} and other.find(second) is None
    with path.open("ab") as file:
        file.write(b'{"digest": "of a run that was ki')
    assert other.find(second) is None
    other.put(second, {"loss": 3.0})
    assert cache.find(second) == Cache(path).find(second) == {"loss": 3.0}
    assert [line["result"]["loss"] for line in Cache(path).lines()] == [2.0, 3.0]


def test_a_rate_is_chosen_by_other_sequences_than_those_that_are_reported(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trials.jsonl")

    def at(rate: float) -> Trial:
        return Trial("dense", "small", 6, 0, rate=rate)

    for rate, loss, choice in ((1e-3, 1.0, 3.0), (2e-3, 2.0, 2.0), (4e-3, 3.0, 3.0)):
        for trial in of_seeds(at(rate), 2):
            cache.put(trial, {"loss": loss, "choice_loss": choice})
    assert best_rate((1e-3, 2e-3, 4e-3), 2e-3, at, cache) == (2e-3, [])


@pytest.mark.parametrize(("kind", "count"), [("dense", 1024), ("vision", 180)])
def test_what_chooses_and_what_is_reported_are_halves_of_what_is_held_out(kind: str, count: int) -> None:
    data = tasks.TrialData(kind, "small", 0)
    name = "input_ids" if kind == "dense" else "pixel_values"
    halves = [
        [row.numpy().tobytes() for batch in half for row in batch[name]] for half in (data.choice, data.evaluation)
    ]
    assert len(halves[0]) == count and len(halves[1]) in (count, count - 1)
    shared = set(halves[0]) & set(halves[1])
    assert len(shared) <= 0.02 * count, "a few short texts come twice"


@pytest.mark.slow
def test_a_trials_line_names_its_processor_and_one_of_the_code_before_is_not_run() -> None:
    trial = Trial("dense", "small", 1, 0)
    result = run_trial(trial)
    assert "torch " in result["processor"] and result["choice_loss"] == pytest.approx(result["loss"], abs=0.5)
    with pytest.raises(ValueError, match="a code that is gone"):
        run_trial(replace(trial, published=True))


def test_seeds_are_compared_where_both_are_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trials.jsonl")
    alone = [Trial("dense", "small", 6, seed) for seed in range(3)]
    four = [replace(one, learners=4) for one in alone]
    for trial, loss in ((alone[0], 1.0), (alone[2], 2.0), (four[1], 3.0), (four[2], 4.0)):
        cache.put(trial, {"loss": loss})
    assert common_losses(four, alone, cache) == ([4.0], [2.0])


def test_a_search_asks_for_neighbours_until_none_is_better(tmp_path: Path) -> None:
    cache, asked = Cache(tmp_path / "trials.jsonl"), []
    rates = (0.1, 0.2, 0.4, 0.8, 1.6)

    def at(rate: float) -> Trial:
        return Trial("dense", "small", 6, 0, rate=rate)

    def loss(trial: Trial) -> float:
        return abs((trial.rate or 0.0) - 0.8) + 0.5 * trial.seed

    while True:
        best, missing = best_rate(rates, 0.2, at, cache)
        if best is not None:
            break
        assert missing, "nothing is asked for and nothing is known"
        for trial in missing:
            asked.append((trial.rate, trial.seed))
            cache.put(trial, {"loss": loss(trial)})
    assert best == 0.8
    assert sorted(asked) == [(rate, seed) for rate in rates for seed in (0, 1)]
    assert best_rate(rates, 0.8, at, cache) == (0.8, [])


@pytest.mark.parametrize("learners", [0, 16])
def test_a_trial_has_its_best_rate_where_the_cache_knows_it(tmp_path: Path, learners: int) -> None:
    cache, trial = Cache(tmp_path / "trials.jsonl"), Trial("dense", "small", 6, 0, learners=learners)
    found, missing = tuned(trial, cache)
    assert found == trial and {one.rate for one in missing} == {1e-3, 2e-3, 4e-3}
    for rate in INNER_RATES:
        for one in of_seeds(replace(trial, rate=rate), 2):
            cache.put(one, {"loss": 2.0 + abs(rate - 4e-3)})
    assert tuned(trial, cache) == (replace(trial, rate=4e-3), [])
    # What the task says is the rate of a trial that names none.
    assert replace(trial, rate=2e-3).digest == trial.digest


MUONS = 16e-3


def test_each_arm_of_quality_has_its_own_best_rate_and_faults_have_that_of_four(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trials.jsonl")
    chosen = quality.parse(["--kinds", "dense", "--sizes", "small", "--lengths", "6"])
    best = {0: 8e-3, 1: 4e-3, 2: 4e-3, 4: 2e-3, 8: 1e-3, 16: 1e-3}
    assert dict(quality.searches(chosen)).keys() == {
        "dense-small, 6 merges, data-parallel",
        *(f"dense-small, 6 merges, M = {learners}" for learners in quality.LEARNERS),
        f"dense-small, 6 merges, {quality.MUON}",
    }
    while wanted := quality.next_rates(chosen, cache):
        for trial in wanted:
            rate = MUONS if trial.inner == "muon" else best[trial.learners]
            cache.put(trial, {"loss": 2.0 + abs((trial.rate or 0.0) - rate)})
    (reference,) = quality.references(chosen)
    reference, _ = tuned(reference, cache)
    assert reference.rate == best[0]
    found = {name: trial.rate for name, trial in quality.best_arms(reference, chosen, cache)}
    others = {"M = 4, faults": best[4], quality.DDP: best[0], quality.MUON: MUONS}
    assert found == {f"M = {m}": best[m] for m in quality.LEARNERS} | others


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["M = 1"], ["M = 1"]),
        (["M = 4"], ["M = 4", "M = 4, faults"]),
        (["faults", "DDP"], ["M = 4, faults", "DDP, two ranks"]),
        ([], ["M = 1", "M = 2", "M = 4", "M = 8", "M = 16", "M = 4, faults", "DDP, two ranks", quality.MUON]),
    ],
)
def test_arms_are_chosen_by_whole_words_of_their_names(words: list[str], expected: list[str]) -> None:
    chosen = quality.parse(["--arms", *words] if words else [])
    assert [name for name, _ in quality.arms(Trial("dense", "small", 6, 0), chosen)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("program", [quality, ablations])
def test_what_the_long_forms_train_without_more_words_is_kept(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the published tables choose by themselves was run."""
    wanted: list[Trial] = []

    def run_trials(trials: Iterable[Trial], cache: Cache, *_: object, **__: object) -> bool:
        wanted.extend(trial for trial in trials if cache.find(trial) is None)
        return not wanted

    monkeypatch.setattr(program, "run_trials", run_trials)
    monkeypatch.setattr(program, "check_cache", lambda *_: None)  # that it is only shown
    assert program.main(["--published"]) == 0
    assert wanted == []


def test_of_the_larger_models_some_arms_are_trained_only_when_they_are_asked_for() -> None:
    def asked(*words: str) -> set[tuple[str, str, int, str]]:
        chosen = quality.parse(words)
        return {
            (reference.kind, reference.size, reference.merges, name)
            for reference in quality.references(chosen)
            for name, _ in quality.arms(reference, chosen)
        }

    by_itself = asked()
    assert {name for *where, name in by_itself if where == ["dense", "large", 200]} == {
        "M = 4",
        "M = 8",
        quality.FAULTS,
    }
    assert not any(where == ["moe", "large", 200] for *where, _ in by_itself)
    assert ("moe", "large", 40, "M = 16") not in by_itself
    assert ("moe", "small", 200, "M = 16") in by_itself
    for words in (["--lengths", "40", "200"], ["--arms", "M = 16"]):
        assert {("moe", "large", 40, "M = 16"), ("moe", "large", 200, "M = 16")} <= asked(*words)


def test_results_in_the_repository_are_of_the_trials_as_they_are_made_now() -> None:
    """A default, a task or ``CODE`` that changes makes other trials: take their lines out, and run them again."""
    old, lines = [], Cache(RESULTS).lines()
    assert len(lines) > 100
    for line in lines:
        said = {**line["trial"], "pace": tuple(line["trial"].get("pace", ()))}
        said["published"] = line["code"] == PUBLISHED[said["kind"]]
        assert said["published"] or line["result"]["processor"]
        if Trial(**said).digest != line["digest"]:
            old.append(f"{line['digest']} {line['trial']}")
    assert not old


def test_means_have_students_interval() -> None:
    found = mean([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 3.0
    assert found.half == pytest.approx(2.7764 * (2.5 / 5) ** 0.5, rel=1e-4)  # t of 4 degrees, 97.5 %
    over = excess([2.2, 4.4], [2.0, 4.0])
    assert over.value == pytest.approx(10.0) and over.half == pytest.approx(0.0, abs=1e-9)
    assert make_row("a", [2.2], "b", [2.0]).interval is None


def test_an_arm_is_beside_the_default_of_its_group_by_the_seeds_that_both_have(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trials.jsonl")
    arms = ablations.chosen_arms(ablations.parse(["--groups", "adoption", "--lengths", "6"]))
    keep, overwrite, *_ = (replace(one, rates=(one.start,)) for one in arms)
    for one, factor, seeds in ((keep, 1.0, 4), (overwrite, 1.1, 3)):
        for seed in range(seeds):
            # A seed's own part is ten times what the arms differ by, and must not be in the interval.
            cache.put(replace(one.at(one.start), seed=seed), {"loss": (2.0 + seed) * factor, "seconds": 1.0})
    for seed in range(4):
        cache.put(replace(keep.reference, seed=seed), {"loss": 2.0, "seconds": 1.0})
    default, row = ablations.ablation_rows([keep, overwrite], 5, cache)
    assert (default.default, default.default_ratio) == ("", None)
    assert (row.default, row.default_ratio) == ("keep", pytest.approx(1.1))
    assert row.default_interval == pytest.approx(0.0, abs=1e-9) and row.interval is not None and row.interval > 1


def test_each_group_of_ablations_has_its_default_as_an_arm() -> None:
    arms = ablations.chosen_arms(ablations.parse([]))
    for one in arms:
        (default,) = [other for other in arms if ablations.is_default_of(other, one)]
        assert default.trial.learners == one.trial.learners
        if default.name.startswith(("after the mean", "τ = ")):
            continue  # sparse pushes beside what SparseLoCo merges so, and rules of adoption where exchanges are long
        # At the rate 1.4 its job is that of a file that names nothing.
        settings = (default.at(1.4).sync, {})
        named, silent = (
            tasks.make_job("dense", "small", default.trial.learners, 10, seed=0, sync=sync) for sync in settings
        )
        assert choose_merge(named.spec, 100_000) == choose_merge(silent.spec, 100_000)
        settled = {"outer": True, "merge": {"method"}}
        assert named.spec.sync.model_dump(exclude=settled) == silent.spec.sync.model_dump(exclude=settled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe", "vision"])
def test_many_learners_at_once_have_the_losses_and_gradients_of_transformers_models(kind: str) -> None:
    import torch

    from diloco_worker.fragments import model_tensors
    from diloco_worker.training import models as real
    from trials import fleet, models, tasks

    job = tasks.make_job(kind, "small", 4, 10, seed=0, sync={})
    learners = fleet.Fleet(kind, "small", job, 4)
    rows = [learners.open_row() for _ in range(4)]
    data = tasks.TrialData(kind, "small", 0)
    batch = data.batch(np.arange(16).reshape(4, 4))
    noise = torch.Generator().manual_seed(0)
    for row in rows:
        for parameter in model_tensors(row.model).values():
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    together = {
        name: torch.stack([model_tensors(row.model)[name].detach() for row in rows]).requires_grad_()
        for name in model_tensors(rows[0].model)
    }
    losses, nats = models.loss_function(tasks.TASKS[kind, "small"].config)(together, batch)
    gradients = torch.autograd.grad(losses.sum(), list(together.values()))
    for index, row in enumerate(rows):
        expected = real.loss(row.model, {name: value[index] for name, value in batch.items()})
        own = torch.autograd.grad(expected.value, list(model_tensors(row.model).values()))
        assert float(nats[index]) == pytest.approx(float(expected.nats), abs=1e-5)
        assert losses[index].item() == pytest.approx(expected.value.item(), abs=1e-5)
        for one, other in zip(gradients, own, strict=True):
            torch.testing.assert_close(one[index], other, rtol=1e-4, atol=1e-5)
