"""Whether a live object still is what was applied: then there is nothing to send.

Theory of operation. A manifest that is applied carries an annotation with its own digest. If the live object has that
digest, it was last applied by us from this very manifest, and no field that an earlier one had is left over. Then it is
enough that every field of the manifest has its value in the live object; what else the live object has (defaults,
status, fields of others) is not ours. So a restarted operator sends nothing for what is in order, and sees what
somebody changed by hand in fields that are ours.

Lists whose items have a key (containers, ports, ...) are matched by it, as server-side
apply merges them; other lists are taken whole. The API server writes quantities in another
way than they were given (1000m is 1), and leaves out what is empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_operator.job import digest
from diloco_operator.model import Object
from diloco_protocol.common.quantities import parse_quantity
from diloco_protocol.vocabulary import DOMAIN

APPLIED = f"{DOMAIN}/applied"
"""Annotation: digest of the manifest that was applied last."""

# Keys of list items, the first that all items of the wanted list have.
_KEYS = (
    ("containerPort", "protocol"),
    ("port", "protocol"),
    ("uid",),
    ("mountPath",),
    ("name",),
    ("type",),
    ("topologyKey", "whenUnsatisfiable"),
    ("ip",),
)
_DEFAULTS = {"protocol": "TCP"}
_QUANTITIES = ("limits", "requests", "capacity", "hard")


def marked(manifest: Object) -> Object:
    """The manifest with its digest as annotation; it is not changed itself."""
    meta = dict(manifest["metadata"])
    meta["annotations"] = {**(meta.get("annotations") or {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": meta}


def state(live: Object) -> str:
    """Digest of what of a live object is not status: it changes when somebody changes the object."""
    meta = {
        key: value
        for key, value in live["metadata"].items()
        if key not in ("managedFields", "resourceVersion", "generation")
    }
    return digest({**{key: value for key, value in live.items() if key != "status"}, "metadata": meta})


def differences(wanted: Object, live: Object) -> list[str]:
    """Paths of the fields of ``wanted`` that ``live`` has not, or with another value; at most a few."""
    found: list[str] = []
    _compare(wanted, live, "", found, quantities=False)
    return found


def is_empty(value: Any) -> bool:
    return value is None or value == {} or value == [] or value == ""


def _compare(wanted: Any, live: Any, path: str, found: list[str], quantities: bool) -> None:
    if len(found) >= 5 or (is_empty(wanted) and is_empty(live)):
        return
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            if any(not is_empty(value) for value in wanted.values()):
                found.append(path)
            return
        for key, value in wanted.items():
            below = quantities or key in _QUANTITIES
            _compare(value, live.get(key), f"{path}.{key}" if path else key, found, quantities=below)
    elif isinstance(wanted, list):
        _compare_lists(wanted, live, path, found, quantities=quantities)
    elif not _same(wanted, live, quantities):
        found.append(path)


def _compare_lists(wanted: Sequence[Any], live: Any, path: str, found: list[str], quantities: bool) -> None:
    keys = _keys(wanted)
    if not isinstance(live, list) or (keys is None and len(wanted) != len(live)):
        found.append(path)
        return
    by_key = {_key(item, keys): item for item in live if isinstance(item, Mapping)} if keys is not None else {}
    for i, item in enumerate(wanted):
        key = _key(item, keys) if keys is not None else (i,)
        _compare(item, live[i] if keys is None else by_key.get(key), f"{path}[{key[0]}]", found, quantities=quantities)


def _keys(items: Sequence[Any]) -> tuple[str, ...] | None:
    """The key by which these items are told apart; None: the list is taken whole."""
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    for keys in _KEYS:
        if all(key in item or key in _DEFAULTS for item in items for key in keys):
            known = [_key(item, keys) for item in items]
            if len(set(known)) == len(known):
                return keys
    return None


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(json.dumps(item.get(key, _DEFAULTS.get(key))) for key in keys)


def _same(wanted: Any, live: Any, quantities: bool) -> bool:
    if wanted == live and isinstance(wanted, bool) == isinstance(live, bool):
        return True
    if quantities and isinstance(live, str | int) and isinstance(wanted, str | int | float):
        try:
            return bool(parse_quantity(str(wanted)) == parse_quantity(str(live)))
        except ValueError:
            return False
    return False
