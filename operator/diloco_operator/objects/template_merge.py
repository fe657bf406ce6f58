"""podTemplate: what the user wants of a pod, merged into what the operator makes of it.

Theory of operation. The merge is Kubernetes' strategic merge for the lists of a pod that
people set: containers, volumes, environment and so on are merged item by item under their
key, other lists are replaced, mappings are merged, null takes a field away. Four things
differ, each because the plain rule makes a pod that no API server takes or nobody wants:

* Of alternatives (a volume's source, a probe's handler, an environment variable's value or
  source) the patch's replaces the base's.
* null takes away no merged list (ours are in it) and none of a container's name, image, command.
* Tolerations are added to; without ours for lost nodes Kubernetes would put in its own,
  which wait five minutes.
* A default request is left out for a resource that the user says anything about, or it
  could exceed the user's limit.

``find_refusals`` says first where a podTemplate contradicts what makes the job work. Everything
else, spelling included, is for the API server to judge when it is asked to take the result.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_operator.model import Object

Path = tuple[str, ...]

_POD = ("spec",)
_CONTAINERS = ("containers", "initContainers")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc"})

# Lists that are merged: field -> the fields that name an item.
_POD_LISTS: dict[str, Path] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
}
_CONTAINER_LISTS: dict[str, Path] = {
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
}
_KEY_DEFAULTS = {"protocol": "TCP"}


class TemplateRefusal(NamedTuple):
    """One place where a podTemplate cannot be taken: its path, and what is wrong, with the cure."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class Protected:
    """What a podTemplate may not touch."""

    container: str  # the main container's name
    labels: Collection[str]  # names of labels and annotations
    env: Collection[str]  # names of environment variables
    mounts: Collection[str]  # mount paths
    volumes: Collection[str]  # names of volumes
    command: str  # what the message says to use instead of command and args


# ------------------------------------------------------------------ merge


def merge_template(base: Object, patch: Mapping[str, Any]) -> Object:
    """A pod template (metadata, spec) with the patch merged in; neither is changed."""
    return _mapping(base, patch, ())


def _mapping(base: Mapping[str, Any], patch: Mapping[str, Any], path: Path) -> Object:
    result: Object = copy.deepcopy(dict(base))
    _drop_alternatives(result, patch, path)
    for key, value in patch.items():
        where = (*path, key)
        if value is None:
            if not _needed(where):
                result.pop(key, None)
        elif isinstance(value, Mapping):
            before = result.get(key)
            result[key] = _mapping(before if isinstance(before, Mapping) else {}, value, where)
        elif isinstance(value, list):
            result[key] = _list(result.get(key), value, where)
        else:
            result[key] = value
    return result


def _list(base: Any, patch: list[Any], path: Path) -> list[Any]:
    before = base if isinstance(base, list) else []
    if path == (*_POD, "tolerations"):
        return copy.deepcopy([*patch, *(t for t in before if not any(_covers(p, t) for p in patch))])
    keys = _keys(path)
    if keys is None or not all(isinstance(item, Mapping) for item in patch):
        return copy.deepcopy(patch)
    result = copy.deepcopy(before)
    for item in patch:
        at = next((i for i, have in enumerate(result) if _key(have, keys) == _key(item, keys)), None)
        # Items are told apart by their key alone: the path of all items of a list is the same.
        merged = _mapping(result[at] if at is not None else {}, item, path)
        if at is None:
            result.append(merged)
        else:
            result[at] = merged
    return result


def _needed(path: Path) -> bool:
    """Whether null is ignored at this path, because no pod could do without the field."""
    in_main = len(path) == 3 and path[1] in _CONTAINERS
    return (
        path in (_POD, ("metadata",))
        or _keys(path) is not None
        or (in_main and path[2] in ("name", "image", "command", "args"))
    )


def _keys(path: Path) -> Path | None:
    if len(path) == 2 and path[:1] == _POD:
        return _POD_LISTS.get(path[1])
    if len(path) == 3 and path[:1] == _POD and path[1] in _CONTAINERS:
        return _CONTAINER_LISTS.get(path[2])
    return None


def _key(item: Any, keys: Path) -> tuple[Any, ...] | None:
    if not isinstance(item, Mapping):
        return None
    return tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys)


def _covers(toleration: Any, other: Mapping[str, Any]) -> bool:
    """Whether a toleration is about the same taint as the other."""
    if not isinstance(toleration, Mapping):
        return False
    effect = toleration.get("effect")
    key = toleration.get("key")
    about = key == other.get("key") or (not key and toleration.get("operator") == "Exists")
    return about and effect in (None, "", other.get("effect"))


def _drop_alternatives(result: Object, patch: Mapping[str, Any], path: Path) -> None:
    """Remove from ``result`` the fields to which the patch gives an alternative."""
    given = {key for key, value in patch.items() if value is not None}
    of_container = path[2] if len(path) == 3 and path[1] in _CONTAINERS else ""
    dropped: Collection[str] = ()
    if path == (*_POD, "volumes") and given - {"name"}:
        dropped = set(result) - {"name"}
    elif of_container == "env" and given & {"value", "valueFrom"}:
        dropped = ("value", "valueFrom")
    elif of_container in _PROBES and given & _HANDLERS:
        dropped = _HANDLERS - given
    for key in dropped:
        result.pop(key, None)
    requests = result.get("requests")
    if of_container == "resources" and isinstance(requests, dict):
        spoken = [patch[kind] for kind in ("requests", "limits") if isinstance(patch.get(kind), Mapping)]
        for name in set().union(*spoken):
            requests.pop(name, None)


# ------------------------------------------------------------------ what is refused


def find_refusals(template: Mapping[str, Any], path: str, protected: Protected) -> list[TemplateRefusal]:
    """The places of a podTemplate, at ``path`` of the job's spec, that cannot be taken; empty: none."""
    found = list(_shapes(template, path, ()))
    if found:
        return found

    def refuse(where: str, message: str) -> None:
        found.append(TemplateRefusal(f"{path}.{where}", message))

    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for kind in ("labels", "annotations"):
        for name in metadata.get(kind) or {}:
            if name in protected.labels or name.startswith("diloco.io/"):
                refuse(f"metadata.{kind}[{name}]", "is the operator's own: leave it out")
    for name in ("name", "namespace", "ownerReferences", "finalizers"):
        if name in metadata:
            refuse(f"metadata.{name}", "is not a pod template's to set: leave it out")
    if spec.get("restartPolicy", "Always") not in ("Always", None):
        refuse("spec.restartPolicy", "must be Always: leave it out")
    grace = spec.get("terminationGracePeriodSeconds")
    if grace is not None and (not isinstance(grace, int) or grace < 1):
        why = "must be at least 1: a learner offers its work before it goes, a syncer makes it durable"
        refuse("spec.terminationGracePeriodSeconds", why)
    for volume in spec.get("volumes") or []:
        if volume["name"] in protected.volumes:
            refuse(f"spec.volumes[{volume['name']}]", "is the operator's own: choose another name")
    main = protected.container
    if any(container["name"] == main for container in spec.get("initContainers") or []):
        refuse(f"spec.initContainers[{main}]", "is the main container's name: choose another")
    for container in spec.get("containers") or []:
        if container["name"] == main:
            found += _main(container, f"{path}.spec.containers[{main}]", protected)
    return found


def _main(container: Mapping[str, Any], path: str, protected: Protected) -> Iterator[TemplateRefusal]:
    for name in ("command", "args"):
        if container.get(name) is not None:
            yield TemplateRefusal(f"{path}.{name}", protected.command)
    for item in container.get("env") or []:
        if item["name"] in protected.env:
            yield TemplateRefusal(f"{path}.env[{item['name']}]", "is set by the operator: leave it out")
    for item in container.get("volumeMounts") or []:
        if str(item["mountPath"]).rstrip("/") in protected.mounts:
            where = f"{path}.volumeMounts[{item['mountPath']}]"
            yield TemplateRefusal(where, "is the operator's own: mount elsewhere")


def _shapes(value: Any, at: str, path: Path) -> Iterator[TemplateRefusal]:
    """The fields that the merge looks into and that are not of the kind that it expects."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key).startswith("$"):
                yield TemplateRefusal(f"{at}.{key}", "directives of patches are not taken: give the fields alone")
                continue
            where = (*path, key)
            mapping = where in ((*_POD,), ("metadata",), ("metadata", "labels"), ("metadata", "annotations"))
            listed = _keys(where) is not None or where == (*_POD, "tolerations")
            if mapping and not isinstance(item, Mapping | None):
                yield TemplateRefusal(f"{at}.{key}", "must be a mapping")
            elif listed and not isinstance(item, list | None):
                yield TemplateRefusal(f"{at}.{key}", "must be a list")
            else:
                yield from _shapes(item, f"{at}.{key}", where)
    elif isinstance(value, list):
        keys = _keys(path)
        seen: list[Any] = []
        for index, item in enumerate(value):
            if keys is not None:
                if not isinstance(item, Mapping) or item.get(keys[0]) is None:
                    yield TemplateRefusal(f"{at}[{index}]", f"must be a mapping with {keys[0]}")
                    continue
                if _key(item, keys) in seen:
                    yield TemplateRefusal(f"{at}[{item[keys[0]]}]", "is there twice: keep one")
                seen.append(_key(item, keys))
            name = item[keys[0]] if keys is not None else index
            yield from _shapes(item, f"{at}[{name}]", path)
