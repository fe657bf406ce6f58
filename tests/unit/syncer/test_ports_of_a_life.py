"""A syncer that begins again from its store keeps its ports, unless another program has one of them meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from diloco_protocol.security.credentials import ListenError
from diloco_syncer import service
from diloco_syncer.runtime.driver import RESTART


@dataclass(frozen=True)
class Addresses:
    """Of ``Options``, what this is about."""

    listen: str = "127.0.0.1:0"
    control: str = "127.0.0.1:0"
    http: str = "127.0.0.1:7702"
    export: str | None = None


@dataclass
class Lives:
    """Each life ends as the next of ``ends`` says: an exit code, or the error of its beginning."""

    ends: list[int | Exception]
    begun: list[Addresses] = field(default_factory=list)

    async def live(self, options: Any) -> tuple[int, Any]:
        self.begun.append(options)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end, replace(options, listen="127.0.0.1:40001", control="127.0.0.1:40002")


async def test_a_port_that_was_taken_meanwhile_is_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives([RESTART, ListenError("in use"), 0])
    monkeypatch.setattr(service, "_life", lives.live)
    monkeypatch.setattr(service.signal, "signal", lambda *_: None)
    assert await service.run(Addresses()) == 0  # type: ignore[arg-type]
    first, again, anew = lives.begun
    assert again == replace(first, listen="127.0.0.1:40001", control="127.0.0.1:40002"), "it keeps its ports"
    assert anew == first


@pytest.mark.parametrize("ends", [[ListenError("in use")], [RESTART, ListenError("in use"), ListenError("in use")]])
async def test_a_port_that_was_asked_for_and_is_in_use_is_an_error(
    ends: list[int | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(ends)
    monkeypatch.setattr(service, "_life", lives.live)
    monkeypatch.setattr(service.signal, "signal", lambda *_: None)
    with pytest.raises(ListenError):
        await service.run(Addresses())  # type: ignore[arg-type]
    assert not lives.ends


@pytest.mark.parametrize("steady", [0.0, 60.0])
async def test_lives_that_end_at_once_begin_again_after_growing_pauses(
    steady: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one life finds in the store, the next may find as well. After a long life nothing is waited for."""
    lives, pauses = Lives([RESTART, RESTART, RESTART, 0]), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(service, "_life", lives.live)
    monkeypatch.setattr(service.signal, "signal", lambda *_: None)
    monkeypatch.setattr(service.asyncio, "sleep", sleep)
    monkeypatch.setattr(service, "STEADY_SECONDS", steady)
    assert await service.run(Addresses()) == 0  # type: ignore[arg-type]
    bounds = [(0.2, 0.4), (0.4, 0.8), (0.8, 1.6)] if steady else [(0.0, 0.0)] * 3
    assert all(least <= pause <= most for pause, (least, most) in zip(pauses, bounds, strict=True)), pauses
