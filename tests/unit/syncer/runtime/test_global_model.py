"""Θ through merges, records and broadcasts, for every encoding down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco_protocol import merging
from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Float64s
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.bandwidth import links
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire import bulk
from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.numerics.merge import piece_squares
from diloco_syncer.numerics.outer import REGISTRY, OuterError
from diloco_syncer.runtime import buffer_pool
from diloco_syncer.runtime.global_model import Diverged, GlobalModel, first_records
from diloco_syncer.store.records import Floats, MergeRecord

LAYOUT = Layout.build(
    [Tensor("embed", (40, 30), "float32", True), Tensor("w", (50, 31), "float32", False)], fragments=2
)
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  learners: {command: [python, x.py]}
  regions: [{name: local, learners: 3}]
"""


def values(fragment: int, seed: int, scale: float = 1.0) -> Floats:
    rng = np.random.default_rng([fragment, seed])
    return (scale * rng.standard_normal(LAYOUT.elements(fragment))).astype(np.float32)


def parameters(*overrides: str, newest: list[MergeRecord] | None = None) -> GlobalModel:
    records = first_records("j", 1, {p: values(p, 0) for p in range(2)}) if newest is None else newest
    model = GlobalModel(parse_job(JOB, overrides), threads=1)
    model.begin(LAYOUT, records)
    return model


def squares(deltas: list[Floats], fragment: int = 0) -> list[Float64s]:
    return [piece_squares(LAYOUT.fragments[fragment], delta) for delta in deltas]


def action(fragment: int, version: int, pushes: int = 2) -> ev.Merge:
    report = StepReport(1, 1, 10, ())
    headers = [
        PushHeader(
            fragment,
            version,
            1,
            1,
            base_version=version - 1,
            oldest_version=version - 1,
            first_step=1,
            last_step=1,
            steps=1,
            tokens=10,
            compute_seconds=0.1,
            encoding="int4",
            layout_digest="",
            report=report,
            slot=m,
            incarnation=1,
        )
        for m in range(pushes)
    ]
    responders = tuple(ev.Responder(h, i, 1 / pushes, 0) for i, h in enumerate(headers))
    return ev.Merge(fragment, version, 1, responders, quorum_seconds=0.1, waited_seconds=0.2, job_tokens=20)


def merge(made: GlobalModel, fragment: int, seed: int) -> MergeRecord:
    version = made.versions[fragment] + 1
    deltas = [values(fragment, 100 * seed + m, 0.01) for m in range(2)]
    record, broadcast = made.merge(action(fragment, version), deltas, squares(deltas, fragment), epoch=1, number=seed)
    made.publish(record, broadcast, 0.0)
    return record


@pytest.mark.parametrize("down", links.DOWN)
def test_the_memory_of_a_version_comes_back_when_nobody_reads_it(down: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "SMALLEST", 1)
    made = parameters(f"sync.compression.down={down}", "sync.outer.optimizer=nesterov")
    merge(made, 0, 1)
    full = made.broadcasts[0].full
    assert full is not None
    read, sent = full.data, full.tobytes()
    del full
    idle = []
    for seed in range(2, 8):
        merge(made, 0, seed)
        idle.append(made.buffers.idle_bytes)
    assert idle[-1] == idle[-2] == idle[-3] > 0
    assert bytes(read) == sent
    del read
    assert made.buffers.idle_bytes > idle[-1]


@pytest.mark.parametrize("down", links.DOWN)
def test_whoever_takes_the_whole_and_whoever_takes_the_update_hold_the_same_bits(down: str) -> None:
    made = parameters(f"sync.compression.down={down}")
    full = made.broadcasts[0]
    held = codec.decode(full.full, full.full_payload.encoding, LAYOUT.elements(0))
    for seed in range(1, 6):
        record = merge(made, 0, seed)
        new = made.broadcasts[0]
        assert new.full_payload.bytes == new.full.nbytes
        assert new.full_payload.checksum == bulk.checksum(new.full)
        whole = codec.decode(new.full, new.full_payload.encoding, LAYOUT.elements(0))
        if down.startswith("delta-"):
            assert new.delta is not None and new.delta_payload is not None
            assert new.delta_payload.checksum == bulk.checksum(new.delta)
            assert new.delta.nbytes < new.full.nbytes / 3
            held = codec.apply_delta(held, new.delta, new.delta_payload.encoding)
            assert np.array_equal(held, whole) and np.array_equal(whole, record.theta)
        else:
            assert new.delta is None
        if down == "float32":
            assert np.array_equal(whole, record.theta)
    assert made.find_broadcast(0, 5) is made.broadcasts[0]
    previous = made.find_broadcast(0, 4)
    assert previous is not None and previous.version == 4
    assert made.find_broadcast(0, 3) is None and made.find_broadcast(7, 0) is None


@pytest.mark.parametrize("down", ["delta-int8", "delta-int4"])
def test_what_quantisation_drops_is_not_lost(down: str) -> None:
    quantised, exact = (parameters(f"sync.compression.down={down}"), parameters("sync.compression.down=float32"))
    for made in (quantised, exact):
        for seed in range(1, 30):
            merge(made, 1, seed)
    record = quantised.newest[1]
    assert record.feedback is not None
    # Θ + what is still owed = Θ without quantisation, to rounding: errors do not add up over merges.
    owed = record.theta + record.feedback - exact.newest[1].theta
    assert np.abs(owed).max() < 1e-4
    assert np.abs(record.feedback).max() > 1e-4


@pytest.mark.parametrize("down", links.DOWN)
@pytest.mark.parametrize("optimizer", sorted(REGISTRY))
def test_a_restart_from_the_records_goes_on_bit_for_bit(down: str, optimizer: str) -> None:
    overrides = (f"sync.compression.down={down}", f"sync.outer.optimizer={optimizer}")
    made = parameters(*overrides)
    for seed in range(1, 4):
        merge(made, 0, seed)
    newest = [MergeRecord.unpack(b"".join(record.pack()), "x") for record in made.newest]
    again = parameters(*overrides, newest=newest)
    for seed in range(4, 7):
        one, other = merge(made, 0, seed), merge(again, 0, seed)
        assert one.digest == other.digest
        assert np.array_equal(made.broadcasts[0].full, again.broadcasts[0].full)


def test_the_merge_that_auto_means_follows_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its outer optimizer, and after a start from records too, when the size is known only then."""
    found = {}
    for words in ((), ("sync.merge.method=isotropic",), ("sync.merge.method=rda",)):
        made = parameters(*words)
        found[words] = merge(made, 0, 1).digest
    assert found[()] == found[("sync.merge.method=isotropic",)] != found[("sync.merge.method=rda",)]
    assert parameters().merging == "isotropic, nesterov at rate 1.4, momentum 0.5"
    monkeypatch.setattr(merging, "ISOTROPIC_BELOW", LAYOUT.total_elements)
    assert parameters().merging == "rda, nesterov at rate 0.7, momentum 0.9"
    assert merge(parameters(), 0, 1).digest == found[("sync.merge.method=rda",)]


def test_an_isotropic_merge_turns_the_matrix_and_nothing_else() -> None:
    sgd = ("sync.outer.optimizer=sgd", "sync.outer.lr=1.0", "sync.compression.down=float32")
    of_matrix = next(p for p, pieces in enumerate(LAYOUT.fragments) if any(x.tensor == "w" for x in pieces))
    steps = {}
    for method in ("rda", "isotropic"):
        made = parameters(*sgd, f"sync.merge.method={method}")
        for fragment in range(2):
            merge(made, fragment, 1)
        steps[method] = [values(p, 0) - made.newest[p].theta for p in range(2)]
    for piece in (piece for pieces in LAYOUT.fragments for piece in pieces if piece.tensor == "embed"):
        span, fragment = slice(piece.offset, piece.offset + piece.elements), 1 - of_matrix
        np.testing.assert_array_equal(steps["isotropic"][fragment][span], steps["rda"][fragment][span])
    (piece,) = (piece for piece in LAYOUT.fragments[of_matrix] if piece.tensor == "w")
    before, after = (
        steps[method][of_matrix][piece.offset : piece.offset + piece.elements].reshape(-1, 31) for method in steps
    )
    assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), rel=1e-4)
    found = np.linalg.svd(after)[1]
    assert found.max() == pytest.approx(found.min(), rel=1e-3)
    assert np.sum(after * before) > 0.5 * np.linalg.norm(after) * np.linalg.norm(before), "it points where Δ does"


def test_a_merge_that_is_not_adopted_changes_nothing() -> None:
    made = parameters()
    merge(made, 0, 1)
    before = MergeRecord.unpack(b"".join(made.newest[0].pack()), "x")
    deltas = [values(0, 7), values(0, 8)]
    first, _ = made.merge(action(0, 2), deltas, squares(deltas), 1, 2)
    again, _ = made.merge(action(0, 2), deltas, squares(deltas), 1, 2)
    assert first.digest == again.digest
    assert made.versions == [1, 0] and np.array_equal(made.newest[0].theta, before.theta)
    assert all(np.array_equal(made.newest[0].outer[k], v) for k, v in before.outer.items())
    with pytest.raises(ValueError, match="3 does not follow 1"):
        made.merge(action(0, 3), deltas, squares(deltas), 1, 2)


def test_sign_and_size_of_a_step() -> None:
    made = parameters("sync.merge.method=rda", "sync.outer.optimizer=sgd", "sync.outer.lr=0.5")
    delta = values(0, 3, 0.1)
    record, _ = made.merge(action(0, 1, pushes=1), [delta], squares([delta]), 1, 1)
    assert np.allclose(record.theta, values(0, 0) - 0.5 * delta, atol=1e-7)
    assert record.responders[0].norm == pytest.approx(float(np.linalg.norm(delta)), rel=1e-6)


def test_a_merge_that_would_be_infinite_is_not_made() -> None:
    made = parameters()
    huge = np.full(LAYOUT.elements(0), 3e38, np.float32)
    with pytest.raises(Diverged, match=r"fragment 0 would become infinite in version 1: .* lower the learning"):
        made.merge(action(0, 1, pushes=1), [huge], squares([huge]), 1, 1)


def test_the_size_of_a_push_is_compared_with_the_parameters_piece_by_piece() -> None:
    """A matrix of zeros, as of an adapter, is compared with the rest of the model."""
    theta = {p: values(p, 0) for p in range(2)}
    theta[0][:] = 0.0
    made = parameters(newest=first_records("j", 1, theta))
    delta = np.full(LAYOUT.elements(0), 3.0, np.float32)
    assert made.growth(0, *squares([delta])) == 0.0, "nothing is known to compare it with"
    other = made.growth(1, *squares([np.full(LAYOUT.elements(1), 12.0, np.float32)], 1))
    spans = [slice(piece.offset, piece.offset + piece.elements) for piece in LAYOUT.fragments[1]]
    sizes = [float(np.sqrt(np.mean(np.square(theta[1][span], dtype=np.float64)))) for span in spans]
    usual = float(np.sqrt(np.sum(np.square(theta[1], dtype=np.float64)) / LAYOUT.total_elements))
    assert other == pytest.approx(12.0 / (min(sizes) + usual), rel=1e-5)
    assert made.growth(0, *squares([delta])) == pytest.approx(3.0 / usual, rel=1e-5)
    record, broadcast = made.merge(action(0, 1, pushes=1), [delta], squares([delta]), 1, 1)
    before = made.growth(0, *squares([delta]))
    assert before == pytest.approx(3.0 / usual, rel=1e-5), "a version that is not durable counts for nothing"
    made.publish(record, broadcast, 0.0)
    assert made.growth(0, *squares([delta])) < 3.0 / usual, "it is compared with the newest version"


def test_another_outer_optimizer_begins_anew_where_the_parameters_are() -> None:
    made = parameters()
    merge(made, 0, 1)
    before = made.newest[0].theta.copy()
    again = parameters("sync.outer.optimizer=adamw", newest=made.newest)
    assert again.outer_state_reset and not made.outer_state_reset
    assert np.array_equal(again.newest[0].theta, before) and again.newest[0].version == 1
    assert not parameters("sync.outer.lr=0.1", newest=made.newest).outer_state_reset
    # Its second merge is that of an optimizer which has had none, from these parameters.
    merge(again, 0, 2)
    fresh = parameters("sync.outer.optimizer=adamw", newest=[replace(r, outer={}) for r in made.newest])
    merge(fresh, 0, 2)
    assert np.array_equal(again.newest[0].theta, fresh.newest[0].theta)
    assert again.newest[0].outer["merges"][0] == 1
    # What the store holds is not changed by it, and a state of the right name and a wrong size is refused.
    assert set(made.newest[0].outer) == {"merges", "momentum"}
    broken = replace(made.newest[0], outer={**made.newest[0].outer, "momentum": np.zeros(3, np.float32)})
    with pytest.raises(OuterError, match="momentum"):
        parameters(newest=[broken, *made.newest[1:]])


def test_a_codec_for_broadcasts_that_changes_brings_no_old_remainder_back() -> None:
    made = parameters("sync.compression.down=delta-int8")
    merge(made, 0, 1)
    assert made.newest[0].feedback is not None
    whole = parameters("sync.compression.down=bfloat16", newest=made.newest)
    merge(whole, 0, 2)
    assert whole.newest[0].feedback is None
    again = parameters("sync.compression.down=delta-int4", newest=whole.newest)
    merge(again, 0, 3)
    assert again.newest[0].feedback is not None


def held_bytes(model: GlobalModel) -> int:
    """Of all arrays of the newest records and the broadcasts, each counted once."""
    arrays: list[np.ndarray] = []
    for record in model.newest:
        arrays += [record.theta, *record.outer.values(), *([record.feedback] if record.feedback is not None else [])]
    for broadcast in (*model.broadcasts, *model.previous, *(b for kept in model.superseded for b in kept)):
        if broadcast is not None:
            arrays += [part for part in (broadcast.full, broadcast.delta) if part is not None]
    return sum({part.ctypes.data: part.nbytes for part in arrays}.values())


@pytest.mark.promise(
    "A syncer's model stays within 4 × its parameters with every encoding and outer optimizer (4.5 with a "
    "delta codec down and two moments), however slowly clients read"
)
@pytest.mark.parametrize("down", links.DOWN)
@pytest.mark.parametrize("optimizer", REGISTRY)
def test_what_a_model_takes_is_within_four_times_its_parameters(down: str, optimizer: str) -> None:
    """Updates with two moments need four vectors for the next merge alone, and the updates come on top."""
    model = parameters(f"sync.compression.down={down}", f"sync.outer={{optimizer: {optimizer}, lr: 0.1}}")
    for seed in (1, 2, 3):
        for fragment in range(2):
            merge(model, fragment, seed)
    two_moments = optimizer in ("adamw", "cosine-gated")
    bound = 18.2 if two_moments and down.startswith("delta") else 16.2  # scales and counts, which are few
    assert held_bytes(model) / LAYOUT.total_elements <= bound


@pytest.mark.promise(
    "A syncer's model stays within 4 × its parameters with every encoding and outer optimizer (4.5 with a "
    "delta codec down and two moments), however slowly clients read"
)
def test_where_updates_are_broadcast_an_older_version_is_whole_only_for_who_reads_it() -> None:
    model = parameters("sync.compression.down=delta-int8")
    merge(model, 0, 1)
    merge(model, 1, 1)
    model.downloads.begin_part(1, 1, "slow", 100, 0.0)
    for fragment in range(2):
        merge(model, fragment, 2)
    kept, read = model.find_broadcast(0, 1), model.find_broadcast(1, 1)
    assert kept is not None and kept.full is None and kept.delta is not None
    assert read is not None and read.full is not None
    model.downloads.end_part(1, 1, "slow", (0, 100), 1.0)
    model.drop_superseded(2.0)
    read = model.find_broadcast(1, 1)
    assert read is not None and read.full is None and read.delta is not None


@pytest.mark.promise(
    "A syncer's model stays within 4 × its parameters with every encoding and outer optimizer (4.5 with a "
    "delta codec down and two moments), however slowly clients read"
)
def test_slow_readers_of_all_fragments_together_keep_half_a_model_at_most() -> None:
    fragments = 12
    layout = Layout.build([Tensor(f"w{i}", (8, 8), "float32", False) for i in range(fragments)], fragments)
    model = GlobalModel(parse_job(JOB), threads=1)
    model.begin(layout, first_records("j", 1, {p: np.zeros(64, np.float32) for p in range(fragments)}))
    for version in range(1, 5):
        for fragment in range(fragments):
            model.downloads.begin_part(fragment, version - 1, "slow", 100, float(version))
            record = replace(model.newest[fragment], version=version)
            model.publish(record, model.encode(record, None), float(version))
    assert [len(kept) for kept in model.superseded].count(0) >= fragments // 2
    assert sum(len(kept) for kept in model.superseded) == fragments // 2


@pytest.mark.promise("A drain does not make the model worse: old work is taken by its mean, without rate and momentum")
def test_old_work_in_the_last_merge_is_the_mean_alone() -> None:
    def merged(ages: tuple[int, int], last: bool) -> tuple[MergeRecord, np.ndarray]:
        made = parameters()
        before = merge(made, 0, 1)
        usual = action(0, 2)
        responders = tuple(
            replace(r, age=age, weight=w) for r, age, w in zip(usual.responders, ages, (0.25, 0.75), strict=True)
        )
        deltas = [values(0, 200 + m, 0.01) for m in range(2)]
        asked = replace(usual, responders=responders, last=last)
        record, _ = made.merge(asked, deltas, squares(deltas, 0), epoch=1, number=2)
        mean = before.theta - (np.float32(0.25) * deltas[0] + np.float32(0.75) * deltas[1])
        assert last or set(record.outer) == set(before.outer)
        return record, mean

    record, mean = merged((2, 2), last=True)
    np.testing.assert_allclose(record.theta, mean, rtol=1e-5, atol=1e-7)
    for ages, last in (((2, 2), False), ((0, 2), True), ((3, 1), True)):
        record, mean = merged(ages, last)
        assert not np.allclose(record.theta, mean, rtol=1e-3, atol=1e-4), "the job's own step"


MEDIAN = ["sync.merge.method=median", "sync.quorum=3"]


def test_a_last_merge_of_old_work_is_bounded_by_the_median_too() -> None:
    made = parameters(*MEDIAN)
    before = merge(made, 0, 1)
    usual = action(0, 2, pushes=3)
    asked = replace(usual, responders=tuple(replace(r, age=2) for r in usual.responders), last=True)
    deltas = [values(0, 200 + m, 0.01) for m in range(3)]
    deltas[0] *= np.float32(1000)
    record, _ = made.merge(asked, deltas, squares(deltas, 0), epoch=1, number=2)
    moved, largest = (float(np.linalg.norm(x)) for x in (record.theta - before.theta, deltas[1]))
    assert 0 < moved < 2 * largest


def test_all_pushes_of_a_slot_are_one_learners_by_the_median() -> None:
    def merged(slots: tuple[int, ...]) -> np.ndarray:
        made, usual = parameters(*MEDIAN), action(0, 1, pushes=5)
        responders = tuple(
            replace(r, header=replace(r.header, slot=slot)) for r, slot in zip(usual.responders, slots, strict=True)
        )
        deltas = [values(0, 7, 0.01)] * 3 + [values(0, 8, 0.01)] * 2
        record, _ = made.merge(replace(usual, responders=responders), deltas, squares(deltas, 0), 1, 1)
        return record.theta

    assert np.array_equal(merged((0, 1, 2, 3, 4)), merged((0, 1, 2, 3, 3))), "three of five, and three of four"
    assert not np.array_equal(merged((0, 1, 2, 3, 4)), merged((0, 0, 0, 3, 4))), "one of three"
