"""One kubeconfig with several clusters' contexts, each under a name of one's own.

python tools/contexts.py OUT NAME=KUBECONFIG...     takes each file's current context
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from diloco_protocol.common.files import write_whole


def named(name: str, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The current context of a kubeconfig with its cluster and user, all called ``name``."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    current = document["current-context"]
    context = next(c["context"] for c in document["contexts"] if c["name"] == current)
    cluster = next(c["cluster"] for c in document["clusters"] if c["name"] == context["cluster"])
    user = next(u["user"] for u in document["users"] if u["name"] == context["user"])
    return {
        "contexts": [{"name": name, "context": {**context, "cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
    }


def main(words: list[str]) -> int:
    if len(words) < 2 or not all("=" in word for word in words[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    merged: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": words[1].partition("=")[0],
        "contexts": [],
        "clusters": [],
        "users": [],
    }
    for word in words[1:]:
        name, _, path = word.partition("=")
        try:
            found = named(name, Path(path))
        except (OSError, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
            print(f"{path}: no kubeconfig with a current context ({error!r})", file=sys.stderr)
            return 2
        for key, rows in found.items():
            merged[key] += rows
    write_whole(Path(words[0]), yaml.safe_dump(merged).encode(), mode=0o600)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
