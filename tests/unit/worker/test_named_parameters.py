"""What of a model may change under a Learner, and what may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diloco_worker import named_parameters
from diloco_worker.fragments import build_layout
from diloco_worker.named_parameters import ModelWatch, refuse_shared_memory
from diloco_worker.settings import ConfigurationError


class Small(torch.nn.Module):
    """A frozen layer, a trained one, a head; a persistent buffer and one that is a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.mean: torch.Tensor
        self.cache: torch.Tensor


def replace_head(model: Small) -> None:
    model.head = torch.nn.Linear(4, 2)


def replace_in_list(model: Small) -> None:
    model.layers[0] = torch.nn.Linear(4, 4)


def assign_data(model: Small) -> None:
    model.head.weight.data = model.head.weight.data.clone()


def assign_parameter(model: Small) -> None:
    model.head.weight = torch.nn.Parameter(torch.ones(2, 4))


def remove_layer(model: Small) -> None:
    del model.layers[0]


@pytest.mark.promise(
    "Parameters that were moved or assigned anew, shards of a model, and channels_last are refused by "
    "name, with the fix"
)
@pytest.mark.parametrize("change", [replace_head, replace_in_list, assign_data, assign_parameter, remove_layer])
def test_what_takes_the_place_of_a_trained_parameter_is_noticed(change: Callable[[Small], None]) -> None:
    """Also a module that takes another one's place, which keeps its own parameters."""
    model = Small()
    watch = ModelWatch(model)
    watch.check()
    change(model)
    for _ in range(2):  # again and again
        with pytest.raises(ConfigurationError, match=r"parameter (head|layers\.0)\.weight was moved or assigned anew"):
            watch.check()


@pytest.mark.promise("Layers that are unfrozen or added after the Learner was made are refused by name, with the fix")
def test_what_is_trained_beside_the_exchanged_parameters_is_noticed() -> None:
    model = Small()
    watch = ModelWatch(model)
    model.base.weight.requires_grad_(True)
    with pytest.raises(
        ConfigurationError, match=r"parameter base\.weight was unfrozen, or added, .* set its \.grad to No"
    ):
        watch.check()
    model.base.weight.requires_grad_(False)
    watch.check()
    model.layers.append(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match=r"parameter layers\.1\.weight was unfrozen, or added"):
        watch.check()


def test_what_changes_nothing_of_the_exchange_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezing a layer, wrapping the model, adding a module without parameters or with frozen ones. What has changed is
    looked at by name once, and from then on as it is."""
    looks = list[torch.nn.Module]()
    by_name = named_parameters.named_parameters
    monkeypatch.setattr(named_parameters, "named_parameters", lambda model: looks.append(model) or by_name(model))
    model = Small()
    watch = ModelWatch(model)
    model.layers[0].requires_grad_(False)
    model.layers[0].requires_grad_(True)
    model.head.requires_grad_(False)
    model.add_module("tap", torch.nn.Identity())
    model.add_module("teacher", torch.nn.Linear(4, 4).requires_grad_(False))
    model.base = torch.nn.Linear(4, 4).requires_grad_(False)
    looks.clear()
    watch.check()
    watch.check()
    assert len(looks) == 1
    model.head.requires_grad_(True)
    watch.check()
    torch.compile(model)
    model.tap = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=r"parameter tap\.weight was unfrozen, or added"):
        watch.check()  # what was added harmlessly is watched too


def test_frozen_parameters_and_buffers_that_are_written_to_are_named_once() -> None:
    model = Small()
    watch = ModelWatch(model)
    assert watch.changed_state() == []
    with torch.no_grad():
        model.base.bias.mul_(0.9)
        model.head.weight.add_(1.0)
    model.mean.add_(1.0)
    model.cache.add_(1.0)
    assert watch.changed_state() == ["base.bias", "mean"]
    assert watch.changed_state() == []
    first, second = torch.zeros(4), torch.zeros(4)
    for model.mean in (first, second):
        assert watch.changed_state() == ["mean"], "assigned anew"
    with torch.inference_mode():
        model.mean = torch.zeros(4)
    assert watch.changed_state() == [], "what has no count of writes is left alone"


@pytest.mark.promise(
    "Two parameters in one memory, which an exchange would move twice, are refused by name, with the fix"
)
def test_two_parameters_in_one_memory_are_refused() -> None:
    """Tied by ``.data``, as older code does, or views of one buffer; one parameter under two names is fine."""
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False))
    build_layout(model, 1)
    model[1].weight.data = model[0].weight.data
    words = r"parameters 0\.weight and 1\.weight lie in the same memory .* b\.weight = a\.weight"
    with pytest.raises(ConfigurationError, match=words):
        build_layout(model, 1)
    model[1].weight = model[0].weight
    build_layout(model, 1)
    flat = torch.zeros(40)
    parts = (flat[:40], flat[4:8].requires_grad_(False), flat[30:])
    views = torch.nn.ParameterList(torch.nn.Parameter(part, requires_grad=False) for part in parts)
    refuse_shared_memory(views)  # none is trained
    views[2].requires_grad_(True)
    with pytest.raises(ConfigurationError, match="parameters 0 and 2 lie in the same memory"):
        refuse_shared_memory(views)
    apart = torch.nn.ParameterList(torch.nn.Parameter(part) for part in (flat[:20], flat[20:], flat[:0]))
    refuse_shared_memory(apart)
    with torch.device("meta"):
        refuse_shared_memory(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))


def test_a_lazy_module_is_asked_to_run_once() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(
        ConfigurationError, match=r"parameter 0\.weight has no shape before the first forward pass .* run on"
    ):
        build_layout(model, 1)
    model(torch.ones(1, 2))
    build_layout(model, 1)
