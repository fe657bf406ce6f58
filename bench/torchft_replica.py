"""torchft's DiLoCo through the relays of bench/bandwidth.py: one replica a process, a lighthouse in the bench's own.

It runs as Streaming DiLoCo, which loses least on a slow link: as many fragments as the model has layers, if they divide
H, each sent in the background for all but one of the steps until its turn ends. Values are float32, since torchft
quantizes on GPUs alone. Outer optimizer: the job's, after a mean.

Needs the package ``torchft``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CALL_SECONDS = 420.0


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def log_errors_only() -> None:
    """Keep torchft's log of each quorum out of the terminal, unless RUST_LOG asks for it. Before it is imported."""
    os.environ.setdefault("RUST_LOG", "error")


def serve_lighthouse(replicas: int) -> tuple[Any, str]:
    """A lighthouse that waits for all replicas, and its address. It serves until it is shut down or let go of."""
    log_errors_only()
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", replicas, join_timeout_ms=60_000, quorum_tick_ms=20)
    port = server.address().rpartition(":")[2]
    return server, f"http://127.0.0.1:{port}"


def fragments_of(model: Any, every: int) -> list[Any]:
    """Disjoint modules with all of a llama's parameters: runs of layers, of which the first has the embeddings and the
    last the norm and the output. Their number divides ``every``, and leaves two steps for each at least."""
    from torch import nn

    layers = list(model.model.layers)
    count = max(n for n in range(1, len(layers) + 1) if every % n == 0 and (n == 1 or every // n >= 2))
    groups = [layers[len(layers) * i // count : len(layers) * (i + 1) // count] for i in range(count)]
    groups[0].insert(0, model.model.embed_tokens)
    groups[-1] += [model.model.norm, model.lm_head]
    return [nn.ModuleList(group) for group in groups]


def train(
    model: Any,
    optimizer: Any,
    step: Callable[[int], None],
    *,
    rank: int,
    replicas: int,
    every: int,
    outer: tuple[float, float],
    lighthouse: str,
    requests_address: str,
) -> None:
    """Train until the process is killed. ``step`` makes one inner step, given its number. ``outer``: the outer rate and
    momentum. Replicas are ranked by their names, so that each one's link is that of its rank."""
    log_errors_only()
    import torch
    from torch import distributed
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    from relayed_store import RelayedStore

    class RelayedGloo(ProcessGroupGloo):  # type: ignore[misc]  # torchft has no types here
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            return super()._create_pg(RelayedStore(store, rank, requests_address), rank, world_size)

    wait = timedelta(seconds=CALL_SECONDS)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=RelayedGloo(timeout=wait),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["inner"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "inner": optimizer.state_dict()},
        min_replica_size=replicas,
        use_async_quorum=False,
        replica_id=f"learner-{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=wait,
        connect_timeout=wait,
        quorum_timeout=wait,
    )
    fragments = fragments_of(model, every)
    lr, momentum = outer
    outers = [torch.optim.SGD(part.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0) for part in fragments]
    delay = every // len(fragments) - 1
    with DiLoCo(manager, fragments, optimizer, outers, every, use_bucketization=True, fragment_sync_delay=delay):
        number = 0
        while True:
            step(number)
            number += 1
