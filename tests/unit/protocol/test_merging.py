"""What `auto` and empty fields of sync.merge and sync.outer mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_protocol.merging import ISOTROPIC_BELOW, choose_merge, is_unmeasured, outer_settings
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import parse_job
from diloco_protocol.spec.sync import OuterSpec
from wrong_jobs import local_job


def spec(**fields: Any) -> JobSpec:
    return parse_job(json.dumps(local_job(fields))).spec


@pytest.mark.parametrize(
    ("fields", "parameters", "method"),
    [
        ({}, 1000, "isotropic"),
        ({}, ISOTROPIC_BELOW - 1, "isotropic"),
        ({}, ISOTROPIC_BELOW, "rda"),
        ({"sync.deterministic": True}, 1000, "isotropic"),
        ({"training.model": {"from": "gpt2"}}, 1000, "rda"),
        ({"training.model": {"from": "gpt2", "lora": {"rank": 4}}}, 1000, "rda"),
        ({"sync.merge.method": "isotropic", "training.model": {"from": "gpt2"}}, 10**10, "isotropic"),
        ({"sync.merge.method": "mean"}, 1000, "mean"),
        ({"sync.merge.method": "median", "sync.quorum": 3}, ISOTROPIC_BELOW - 1, "isotropic-median"),
        ({"sync.merge.method": "median", "sync.quorum": 3}, ISOTROPIC_BELOW, "median"),
        ({"sync.merge.method": "rda"}, 1000, "rda"),
    ],
)
def test_auto_is_isotropic_for_small_models_that_are_trained_from_scratch(
    fields: dict[str, Any], parameters: int, method: str
) -> None:
    assert choose_merge(spec(**fields), parameters)[0] == method


@pytest.mark.parametrize(
    ("optimizer", "method", "lr", "momentum"),
    [
        ("nesterov", "rda", 0.7, 0.9),
        ("nesterov", "mean", 0.7, 0.9),
        ("nesterov", "isotropic", 1.4, 0.5),
        ("sgd", "rda", 1.0, 0.9),
        ("sgd", "isotropic", 2.0, 0.5),
        ("sgd", "isotropic-median", 2.0, 0.5),
        ("nesterov", "isotropic-median", 1.4, 0.5),
        ("nesterov", "median", 0.7, 0.9),
        ("adamw", "isotropic", 0.001, 0.5),
        ("cosine-gated", "rda", 0.001, 0.9),
    ],
)
def test_rate_and_momentum_follow_the_merge(optimizer: Any, method: Any, lr: float, momentum: float) -> None:
    found = outer_settings(OuterSpec(optimizer=optimizer), method)
    assert (found.lr, found.momentum) == (lr, momentum)


def test_weights_that_were_trained_before_are_stepped_without_momentum() -> None:
    _, found = choose_merge(spec(**{"training.model": {"from": "gpt2"}}), 1000)
    assert (found.lr, found.momentum) == (1.0, 0.0)
    _, found = choose_merge(spec(**{"training.model": {"from": "gpt2"}, "sync.merge.method": "isotropic"}), 1000)
    assert (found.lr, found.momentum) == (1.4, 0.5)


def test_what_the_job_says_stays() -> None:
    asked = OuterSpec(lr=0.3, momentum=0.0, betas=[0.8, 0.9], eps=1e-6, restart_every=7, age_decay=0.1)
    found = outer_settings(asked, "isotropic")
    fields = ("optimizer", "lr", "momentum", "eps", "restart_every", "age_decay")
    assert [getattr(found, name) for name in fields] == [getattr(asked, name) for name in fields]
    assert found.betas == (0.8, 0.9)


def test_the_descriptions_say_the_values() -> None:
    """They are written by hand beside the fields: the reference and `diloco explain` show them."""
    said = OuterSpec.model_fields["lr"].description or ""
    names: list[Any] = ["nesterov", "sgd", "adamw"]
    methods: list[Any] = ["isotropic", "rda"]
    rates = {outer_settings(OuterSpec(optimizer=name), method).lr for name in names for method in methods}
    assert all(f"{rate:g}" in said for rate in rates)
    momentum = OuterSpec.model_fields["momentum"].description or ""
    assert "0.5 after isotropic" in momentum and "0.9" in momentum


@pytest.mark.promise(
    "Where nothing was measured of a job's merges, validate and plan say so, with small models' figures"
)
def test_nothing_was_measured_of_the_default_for_large_models() -> None:
    assert is_unmeasured(spec(), ISOTROPIC_BELOW) and not is_unmeasured(spec(), ISOTROPIC_BELOW - 1)
    for chosen in ({"sync.merge.method": "rda"}, {"training.model": {"from": "gpt2"}}):
        assert not is_unmeasured(spec(**chosen), ISOTROPIC_BELOW)
