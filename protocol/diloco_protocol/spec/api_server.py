"""What an API server, and kubectl on the way to it, make of a job file beside reading it.

`kubectl get -o yaml` shows a job with the API server's own record of it. A file made from
that is a job file too, so the record is taken out before the models see it.
"""

from __future__ import annotations

from typing import Any

from diloco_protocol.spec.base import Path

# Of every Kubernetes object's metadata, beside what MetadataSpec has.
SERVER_METADATA = frozenset(
    (
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    )
)

_NOT_USED = "is the API server's record of a job there: it is not used, and may be left out"
_DROPPED = "is null: `kubectl apply` without --server-side drops that, and the default holds there: "


def without_server_fields(document: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """A copy of the document without status and the API server's metadata (nothing else is copied), and
    where they were with what to say about it."""
    found: list[Path] = [("status",)] if "status" in document else []
    kept = {key: value for key, value in document.items() if key != "status"}
    metadata = document.get("metadata")
    if isinstance(metadata, dict):
        found += [("metadata", key) for key in metadata if key in SERVER_METADATA]
        kept["metadata"] = {key: value for key, value in metadata.items() if key not in SERVER_METADATA}
    return kept, [(path, _NOT_USED) for path in found]


def dropped_nulls(document: dict[str, Any]) -> list[tuple[Path, str]]:
    """The nulls of a valid job that mean something else than leaving the field out, and what to write
    instead: they do not survive every way to an API server."""
    training = (document.get("spec") or {}).get("training") or {}
    config = (training.get("model") or {}).get("config") or {}
    places: list[tuple[Any, str, Path, str]] = [
        (training, "evaluation", (), "write evaluation: {fraction: 0}"),
        (training.get("optimizer") or {}, "clipNorm", ("optimizer",), "write clipNorm: 0"),
        *((config, key, ("model", "config"), "use --server-side, or diloco apply") for key in config),
    ]
    return [
        (("spec", "training", *path, key), _DROPPED + cure)
        for holder, key, path, cure in places
        if key in holder and holder[key] is None
    ]
