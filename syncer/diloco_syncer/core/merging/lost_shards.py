"""What becomes of pushes when a shard is lost, and when it is back.

A lost shard comes back from its store: with its records and the offers that it had spooled, and without every other
push that was accepted for it and without the merge that it was making. A merge whose record was durable by then is told
before the shard is ready, as any other. The learners of lost pushes have the work, as after a restart of the syncer,
and that of those who have left is lost.

Example. Shard 1 merges pushes of slots 0 and 2, and is lost. It is back without either. The round begins anew, under
another number, for who has answered a round passes over another pull of it; both slots are asked, and push what they
have trained since, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diloco_protocol.vocabulary import EventKind
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.rounds import Accepted
from diloco_syncer.core.state import JobState


class LostShards:
    """``offers``: by fragment, those that wait for a round; they are the aggregator's."""

    def __init__(self, state: JobState, actions: Actions, offers: dict[int, list[Accepted]]) -> None:
        self._state = state
        self._actions = actions
        self._offers = offers

    def mark_lost(self, shard: int, why: str, now: float) -> None:
        """Nobody serves the shard's fragments, for ``why``. Nothing changes for one that is lost already."""
        state = self._state
        if shard in state.shards.lost:
            return
        state.shards.lost[shard] = now
        words = (
            f"shard {shard} is lost, which has {len(state.shards.fragments(shard))} of {len(state.shards.of)} fragments"
        )
        words += f": {why}" if why else ""
        self._actions.record_event(EventKind.SHARD_LOST, None, words)
        if state.rounds:
            state.rounds.lose_shard(shard)
            if state.config.mode.is_scheduled:  # learners send no push again that was accepted
                self._actions.add(ev.RestartFromStore(words, 0))

    def mark_ready(self, shard: int, handles: Mapping[int, int], now: float) -> None:
        """The shard is there, and of the pushes that it had it has these: by the old handle, the new one. Its open
        rounds begin anew with them. To be told twice changes nothing: a push may have its new handle already."""
        state = self._state
        state.shards.lost.pop(shard, None)
        has = {new: new for new in handles.values()} | dict(handles)
        lost = 0
        for fragment in state.shards.fragments(shard) if state.rounds else ():
            assert state.rounds
            opened = state.rounds.open.pop(fragment, None)
            there = [*(opened.pushes if opened else ()), *self._offers.pop(fragment, ())]
            kept = [replace(push, handle=has[push.handle]) for push in there if push.handle in has]
            for push in [push for push in there if push.handle not in has]:
                self._give_up(push)
                lost += 1
            if opened is None:
                self._offers[fragment] = kept
                continue
            again = state.rounds.open_round(fragment, now, state.progress())
            for push in kept:
                replaced = state.rounds.accept(again, push, now)
                self._actions.add(*(ev.ReleasePush(old.handle) for old in replaced))
        words = f"shard {shard} is ready; of the updates that it had {lost} are lost"
        self._actions.record_event(EventKind.SHARD_READY, None, words)

    def _give_up(self, push: Accepted) -> None:
        """The push is gone with its shard: its sender, who may have had no answer, can send it again."""
        header, ledger = push.header, self._state.ledger
        slot = self._state.members.slots[header.slot]
        assert ledger
        if ledger.of_open_tenure(header):
            slot.pushes.unmark_accepted(header.fragment)
        elif tokens := ledger.drop_held(header, "died"):
            self._actions.record_dropped(slot, tokens // ledger.fragments, "died")
        self._actions.add(ev.ReleasePush(push.handle))
