"""manifests/chaos: each is a Schedule as Chaos Mesh has them, and selects pods by labels that the operator gives."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from diloco_operator.names import labels
from repository import ROOT

FILES = sorted((ROOT / "manifests" / "chaos").glob("*.yaml"))
# Of Chaos Mesh 2's API (api/v1alpha1): the field of each type, the actions used here, and what the spec may hold.
TYPES: dict[str, tuple[str, set[str], set[str]]] = {
    "PodChaos": ("podChaos", {"pod-kill", "pod-failure"}, {"gracePeriod"}),
    "NetworkChaos": ("networkChaos", {"partition"}, {"direction", "target"}),
    "StressChaos": ("stressChaos", set(), {"stressors"}),
}
COMMON = {"action", "mode", "selector", "duration"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_manifest_is_a_schedule_of_a_known_type(path: Any) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["apiVersion"] == "chaos-mesh.org/v1alpha1" and document["kind"] == "Schedule"
    spec = document["spec"]
    field, actions, own = TYPES[spec["type"]]
    assert set(spec) == {"schedule", "concurrencyPolicy", "historyLimit", "type", field}
    assert spec["schedule"].startswith("@every ") and spec["concurrencyPolicy"] in ("Allow", "Forbid")
    fault = spec[field]
    assert set(fault) <= COMMON | own and fault["mode"] == "one"
    assert fault.get("action") in actions if actions else "action" not in fault
    assert ("duration" in fault) == (fault.get("action") != "pod-kill"), "what lasts has to say how long"
    operators = labels("tiny-gpt", "learner", "local")
    assert fault["selector"]["labelSelectors"].items() <= operators.items()
    if "target" in fault:
        assert fault["target"]["selector"]["labelSelectors"].items() <= labels("tiny-gpt", "syncer").items()


def test_what_chaos_does_on_one_machine_has_its_manifest() -> None:
    assert {path.stem for path in FILES} == {"kill", "away", "cut", "slow"}
