"""What the commands that change jobs answer programs with: one object, with an item for each context.

With ``--json`` all sentences go to stderr, progress and warnings too, so that stdout has the object and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from diloco.cluster.client import Cluster
from diloco.console import print_text


class Answers:
    """The items of one command: what became of the job ``name`` in each context."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: dict[str, dict[str, Any]] = {}

    def add(self, cluster: Cluster, **facts: Any) -> None:
        """More of what is known of one context."""
        place = {"context": cluster.context, "namespace": cluster.namespace, "job": self._name}
        self._items.setdefault(cluster.context, place).update(facts)

    @contextlib.contextmanager
    def printed(self, as_json: bool) -> Iterator[None]:
        """Around the command: with ``as_json`` print the object at its end, unless it ends with an error."""
        if not as_json:
            yield
            return
        with contextlib.redirect_stdout(sys.stderr):
            yield
        print_text(json.dumps({"items": list(self._items.values())}, indent=1))
