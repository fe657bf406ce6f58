"""Outer optimizers against torch.optim, and their state through save and load."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol import resources
from diloco_protocol.merging import OuterSettings, outer_settings
from diloco_protocol.spec.sync import OuterSpec
from diloco_syncer.numerics import outer
from example_counts import share_of

NAMES = tuple(outer.REGISTRY)


def spec(optimizer: str, **fields: object) -> OuterSettings:
    return outer_settings(OuterSpec.model_validate({"optimizer": optimizer, **fields}), "rda")


def vectors(count: int, elements: int, seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [(source.standard_normal(elements) * scale).astype(np.float32) for _ in range(count)]


def train(settings: OuterSettings, theta: np.ndarray, deltas: list[np.ndarray], **options: object) -> np.ndarray:
    optimizer, state = outer.make(settings), {}
    theta = theta.copy()
    for delta in deltas:
        state = optimizer.step(theta, delta, state, **options)  # type: ignore[arg-type]
    return theta


def torch_train(optimizer: torch.optim.Optimizer, theta: torch.Tensor, deltas: list[np.ndarray]) -> np.ndarray:
    for delta in deltas:
        theta.grad = torch.from_numpy(delta.copy())
        optimizer.step()
    return theta.detach().numpy()


def test_every_name_of_the_spec_is_there_and_no_other() -> None:
    names = OuterSpec.model_json_schema()["properties"]["optimizer"]["enum"]
    assert sorted(names) == sorted(NAMES)


def test_the_memory_that_a_job_needs_counts_each_ones_vectors() -> None:
    assert {name: len(kind.vectors) for name, kind in outer.REGISTRY.items()} == resources._OUTER_VECTORS


def test_plain_sgd_with_rate_1_is_theta_minus_delta_exactly() -> None:
    theta, delta = vectors(2, 10_001)
    np.testing.assert_array_equal(train(spec("sgd", lr=1.0), theta, [delta]), theta - delta)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.1, 0.99)])
def test_nesterov_is_torchs(lr: float, momentum: float) -> None:
    theta, *deltas = vectors(21, 1000, 1)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    expected = torch_train(
        torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0), parameter, deltas
    )
    ours = train(spec("nesterov", lr=lr, momentum=momentum), theta, deltas)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_nesterov_is_the_written_rule_bit_for_bit() -> None:
    theta, *deltas = vectors(6, 1000, 2)
    expected, b = theta.copy(), np.zeros(1000, np.float32)
    lr, mu = np.float32(0.7), np.float32(0.9)
    for delta in deltas:
        b = mu * b + delta
        expected -= lr * (delta + mu * b)
    assert train(spec("nesterov"), theta, deltas).tobytes() == expected.tobytes()


@pytest.mark.parametrize("optimizer", ["adamw", "cosine-gated"])
def test_adam_is_torchs_and_cosine_gated_is_adam_at_age_0(optimizer: str) -> None:
    theta, *deltas = vectors(21, 1000, 3, 1e-2)
    fields = {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-8}
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    expected = torch_train(
        torch.optim.AdamW([parameter], lr=1e-3, betas=(0.8, 0.95), eps=1e-8, weight_decay=0), parameter, deltas
    )
    ours = train(spec(optimizer, **fields), theta, deltas)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_cosine_gated_scales_what_enters_the_moments_by_age() -> None:
    settings = spec("cosine-gated", lr=0.01, age_decay=0.3)
    theta, fresh, old = vectors(3, 100, 4)
    optimizer = outer.make(settings, max_versions=9)
    mine, state = theta.copy(), {}
    state = optimizer.step(mine, fresh, state)
    state = optimizer.step(mine, old, state, ages=[2, 6], weights=[0.75, 0.25])  # mean age 3
    sigma = (1 + math.cos(math.pi * 3 / 10)) / 2 * math.exp(-0.3 * 3)
    expected = train(spec("adamw", lr=0.01), theta, [fresh, (sigma * old).astype(np.float32)])
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    # An old push moves the model less; the oldest that is accepted still counts, beyond it nothing does.
    moves = []
    for age in (0, 3, 9, 10, 50):
        after = optimizer.step(
            theta.copy(), old, {"merges": np.array([1]), **copy(state, drop="merges")}, ages=[age], weights=[1.0]
        )
        moves.append(float(np.abs(after["first"] - np.float32(0.9) * state["first"]).sum()))
    assert moves[0] > moves[1] > moves[2] > moves[3] and moves[2] > 0
    assert moves[3] == pytest.approx(0, abs=1e-5) and moves[4] == pytest.approx(0, abs=1e-5)


def copy(state: outer.State, drop: str = "") -> outer.State:
    return {name: array.copy() for name, array in state.items() if name != drop}


@settings(max_examples=share_of(40), deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 6),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
)
def test_a_copy_of_the_state_continues_bit_for_bit(
    name: str, before: int, after: int, restart: int | None, elements: int, seed: int
) -> None:
    settings = spec(name, lr=0.05, restart_every=restart)
    theta, *deltas = vectors(1 + before + after, elements, seed)
    ages = {"ages": [1, 3], "weights": [0.5, 0.5]}
    through = train(settings, theta, deltas, **ages)
    broken, state = theta.copy(), {}
    first = outer.make(settings)
    for delta in deltas[:before]:
        state = first.step(broken, delta, state, **ages)
    saved = {key: np.frombuffer(array.tobytes(), array.dtype).copy() for key, array in state.items()}
    second = outer.make(settings)
    assert second.check(saved, elements) == before
    for delta in deltas[before:]:
        saved = second.step(broken, delta, saved, **ages)
    assert broken.tobytes() == through.tobytes()


def test_lost_momentum_would_show() -> None:
    # So that the test above is one: with an empty state the same steps end elsewhere.
    theta, *deltas = vectors(5, 50, 6)
    for name in set(NAMES) - {"sgd"}:
        optimizer, state = outer.make(spec(name, lr=0.05)), {}
        forgetful = theta.copy()
        for delta in deltas:
            optimizer.step(forgetful, delta, {})
        assert not np.allclose(forgetful, train(spec(name, lr=0.05), theta, deltas), rtol=1e-3)
        assert not state


@pytest.mark.parametrize("every", [1, 2, 3])
def test_momentum_restarts(every: int) -> None:
    theta, *deltas = vectors(8, 100, 7)
    expected = theta.copy()
    for start in range(0, len(deltas), every):
        expected = train(spec("nesterov"), expected, deltas[start : start + every])
    ours = train(spec("nesterov", restart_every=every), theta, deltas)
    assert ours.tobytes() == expected.tobytes()


def test_adam_restarts_its_first_moment_and_keeps_the_scale() -> None:
    theta, *deltas = vectors(6, 100, 8)
    optimizer, state = outer.make(spec("adamw", lr=0.01, restart_every=4)), {}
    for delta in deltas[:4]:
        state = optimizer.step(theta, delta, state)
    second, before = state["second"].copy(), theta.copy()
    state = optimizer.step(theta, deltas[4], state)
    v = np.float32(0.999) * second + np.float32(0.001) * deltas[4] ** 2
    np.testing.assert_allclose(state["second"], v, rtol=1e-5)
    np.testing.assert_allclose(state["first"], np.float32(0.1) * deltas[4], rtol=1e-5)
    root = np.sqrt(v / (1 - 0.999**5))  # the second moment's correction goes on counting
    np.testing.assert_allclose(before - theta, 0.01 * deltas[4] / root, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    theta, *deltas = vectors(4, 100_003, 9)
    one = train(spec(name, lr=0.1), theta, deltas)
    for threads in (2, 5):
        assert train(spec(name, lr=0.1), theta, deltas, threads=threads).tobytes() == one.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_sign_a_model_moves_towards_its_learners(name: str) -> None:
    base, target = vectors(2, 200, 10)
    theta = train(spec(name, lr=0.05), base, [base - target])  # Δ = base − θ
    assert np.linalg.norm(theta - target) < np.linalg.norm(base - target)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    theta, delta = vectors(2, 10)
    optimizer = outer.make(spec("nesterov"))
    state = optimizer.step(theta, delta, {})
    before = theta.copy()
    for change, what in [
        ({"momentum": None}, "was sync.outer changed"),
        ({"first": state["momentum"]}, "was sync.outer changed"),
        ({"momentum": state["momentum"][:9]}, "momentum: float32 of shape"),
        ({"momentum": state["momentum"].astype(np.float64)}, "momentum: float64"),
        ({"merges": np.array([1.0])}, "merges"),
        ({"merges": np.array([0])}, "merges"),
        ({"merges": np.array([1, 2])}, "merges"),
    ]:
        broken = {key: array for key, array in {**state, **change}.items() if array is not None}
        with pytest.raises(outer.OuterError, match=what):
            optimizer.step(theta, delta, broken)
    for arguments, what in [
        ((theta, delta[:9]), "delta: float32 of shape"),
        ((theta.astype(np.float64), delta), "theta: float64"),
    ]:
        with pytest.raises(outer.OuterError, match=what):
            optimizer.step(*arguments, {})
    for ages in ([math.nan], [-1.0], [math.inf]):
        with pytest.raises(outer.OuterError, match="ages"):
            optimizer.step(theta, delta, copy(state), ages=ages, weights=[1.0])
    with pytest.raises(outer.OuterError, match="theta: read-only"):
        optimizer.step(np.frombuffer(theta.tobytes(), np.float32), delta, {})
    np.testing.assert_array_equal(theta, before)
    assert optimizer.check(state, 10) == 1
