"""An operator in kopf that does nothing: it watches the kinds that ours watches, with kopf's own settings.

Prints the number of objects that it has seen, once a second. `bench/operator_load.py` runs it, for
what kopf and these objects cost in memory before anybody does anything with them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from diloco_operator.kube import kinds

seen: set[str] = set()


async def see(uid: str, **_: Any) -> None:
    seen.add(uid)


async def tell() -> None:
    while True:
        print(len(seen), flush=True)
        await asyncio.sleep(1.0)


async def main() -> None:
    registry = kopf.get_default_registry()
    for kind in (kinds.JOB, kinds.NODE, *kinds.LABELLED):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(see)
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    await asyncio.gather(kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True), tell())


if __name__ == "__main__":
    asyncio.run(main())
