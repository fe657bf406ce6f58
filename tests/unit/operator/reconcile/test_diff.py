"""Whether a live object still is what was applied."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diloco_operator.job import digest
from diloco_operator.reconcile.diff import APPLIED, differences, marked, state

SET: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {
        "name": "j-local",
        "namespace": "n",
        "labels": {"diloco.io/job": "j"},
        "annotations": {"a": "1"},
        "ownerReferences": [{"uid": "u", "kind": "DiLoCoJob", "name": "j", "controller": True}],
    },
    "spec": {
        "replicas": 3,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "learner",
                        "image": "w:1",
                        "args": ["-m", "x"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": ""}],
                        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi"}, "requests": {"cpu": 0.5}},
                        "ports": [{"containerPort": 7710}, {"containerPort": 7711, "protocol": "UDP"}],
                        "volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}],
                    }
                ],
                "tolerations": [{"key": "x", "operator": "Exists"}],
                "volumes": [{"name": "v", "emptyDir": {}}],
                "nodeSelector": {},
            }
        },
    },
}


def live() -> dict[str, Any]:
    """As an API server has it: defaults filled in, quantities in its own way, what is empty left out."""
    made = copy.deepcopy(marked(SET))
    made["metadata"] |= {"uid": "1", "resourceVersion": "5", "generation": 1, "managedFields": [{}]}
    made["spec"]["updateStrategy"] = {"type": "OnDelete"}
    pod = made["spec"]["template"]["spec"]
    del pod["nodeSelector"]
    pod["dnsPolicy"] = "ClusterFirst"
    container = pod["containers"][0]
    container["resources"] = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}
    container["ports"][0]["protocol"] = "TCP"
    container["env"][1] = {"name": "B"}
    container["terminationMessagePath"] = "/dev/termination-log"
    made["status"] = {"replicas": 3}
    return made


def test_what_the_api_server_adds_is_no_difference() -> None:
    assert differences(marked(SET), live()) == []


def test_what_others_add_is_no_difference() -> None:
    there = live()
    pod = there["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "sidecar", "image": "s"})
    pod["containers"][1]["env"].insert(0, {"name": "INJECTED", "value": "x"})
    pod["volumes"].append({"name": "w", "emptyDir": {}})
    there["metadata"]["labels"]["theirs"] = "y"
    there["metadata"]["ownerReferences"].append({"uid": "other"})
    assert differences(marked(SET), there) == []


def test_what_of_ours_was_changed_is_named() -> None:
    def changed(change: str) -> list[str]:
        there = live()
        container = there["spec"]["template"]["spec"]["containers"][0]
        exec(change, {"o": there, "c": container, "p": there["spec"]["template"]["spec"]})
        return differences(marked(SET), there)

    assert changed("o['spec']['replicas'] = 2") == ["spec.replicas"]
    assert changed("c['image'] = 'other'") == ['spec.template.spec.containers["learner"].image']
    assert changed("c['env'][0]['value'] = '2'")
    assert changed("del c['env'][0]")
    assert changed("c['args'].append('more')")
    assert changed("c['args'].reverse()")
    assert changed("c['resources']['limits']['cpu'] = '2'")
    assert changed("c['ports'][1]['protocol'] = 'TCP'")
    assert changed("del c['volumeMounts'][1]")
    assert changed("p['tolerations'].append({'key': 'y'})")
    assert changed("del o['metadata']['labels']['diloco.io/job']")
    assert changed("o['metadata']['ownerReferences'] = []")
    assert changed(f"o['metadata']['annotations']['{APPLIED}'] = 'x'")


def test_a_switch_is_no_number() -> None:
    assert differences({"a": True}, {"a": 1}) == ["a"]
    assert differences({"a": 0}, {"a": False}) == ["a"]
    assert differences({"a": 0}, {}) == ["a"]


def test_quantities_are_only_taken_for_such_where_they_are_some() -> None:
    assert differences({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}) == []
    assert differences({"value": "1000m"}, {"value": "1"}) == ["value"]
    assert differences({"limits": {"cpu": "much"}}, {"limits": {"cpu": "1"}}) == ["limits.cpu"]


def test_marking_leaves_the_manifest_and_tells_manifests_apart() -> None:
    before = copy.deepcopy(SET)
    first = marked(SET)
    assert before == SET
    assert first["metadata"]["annotations"]["a"] == "1"
    other = {**SET, "spec": {**SET["spec"], "replicas": 4}}
    assert marked(other)["metadata"]["annotations"][APPLIED] != first["metadata"]["annotations"][APPLIED]


def test_state_is_what_people_and_programs_change_not_what_happens() -> None:
    before = live()
    after = copy.deepcopy(before)
    after["status"] = {"replicas": 0}
    after["metadata"] |= {"resourceVersion": "9", "generation": 3, "managedFields": []}
    assert state(after) == state(before)
    after["metadata"]["labels"]["x"] = "y"
    assert state(after) != state(before)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcde"), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert differences({"x": value}, {"x": copy.deepcopy(value)}) == []


@given(values, values)
def test_nothing_differs_only_where_the_values_agree_but_for_what_is_empty(left: Any, right: Any) -> None:
    def cleaned(value: Any) -> Any:
        """Without what is empty; what is left of two values decides whether they may pass for equal."""
        if isinstance(value, dict):
            return {k: c for k, v in value.items() if (c := cleaned(v)) not in (None, {}, [], "")}
        return [cleaned(v) for v in value] if isinstance(value, list) else value

    def covered(ours: Any, theirs: Any) -> bool:
        """A plain rule, without keyed lists: every leaf of ours is in theirs."""
        if isinstance(ours, dict):
            return not ours or (
                isinstance(theirs, dict) and all(k in theirs and covered(v, theirs[k]) for k, v in ours.items())
            )
        if isinstance(ours, list):
            return isinstance(theirs, list) and (
                len(ours) == len(theirs) and all(covered(a, b) for a, b in zip(ours, theirs, strict=True))
            )
        return json.dumps(ours) == json.dumps(theirs)

    found = differences({"x": left}, {"x": right})
    if not covered(cleaned({"x": left}), cleaned({"x": right})):
        assert found, (left, right)


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
