"""Deterministic mode (``sync.deterministic``): two runs with one seed end with the same bits.

Everything that depends on timing is put on a schedule of slot steps. The snapshot of fragment p is taken after
step o_p = ⌈(p+1)·H/P⌉, and then every H steps (Streaming DiLoCo's offsets). The merge of that push is adopted
exactly τ steps later, and the learner waits for it. No pull is needed, so a push that a broken session lost is
sent again by itself. A slot stops at its own share of ``training.stop``, whatever the others do.

Example: P = 4, H = 8, τ = 2. Fragment 0 is pushed after steps 2, 10, 18 … and its merges are adopted after
steps 4, 12, 20 ….

``DeterministicMode`` is the worker's whole part in it, beside torch's own settings
(``device.be_deterministic``). There are no threads, clocks or sockets here.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_protocol.spec.training import StopSpec
from diloco_worker.core.adoption import Adoption, AdoptionConfig
from diloco_worker.net.transfers import Push


def first_due(fragment: int, config: AdoptionConfig) -> int:
    """o_p = ⌈(p+1)·H/P⌉, the offset of Streaming DiLoCo."""
    return -(-(fragment + 1) * config.every // config.fragments)


class DeterministicMode:
    """The schedule of one tenure. Its methods are called when what they name has happened."""

    def __init__(self, adoption: Adoption) -> None:
        self._adoption = adoption
        self._pushed_at: dict[int, int] = {}  # per fragment, the step of the push whose merge is not adopted yet
        self._has_pushed: set[int] = set()  # fragments that were pushed or offered
        self._unmerged: dict[tuple[int, int], Push] = {}  # by fragment and sequence

    def on_push(self, push: Push) -> None:
        """A push, or an offer, was made of the fragment as it is now."""
        plan = push.plan
        self._has_pushed.add(plan.fragment)
        if plan.round:
            self._pushed_at[plan.fragment] = plan.last_step
            self._unmerged[plan.fragment, plan.sequence] = push

    def on_resolved(self, fragment: int, sequences: Iterable[int]) -> None:
        """The fate of these pushes is known."""
        for sequence in sequences:
            self._unmerged.pop((fragment, sequence), None)
        if not self._adoption.fragments[fragment].snapshots:
            self._pushed_at.pop(fragment, None)

    def on_adopted(self, fragment: int) -> None:
        """A broadcast of the fragment was adopted."""
        self._pushed_at.pop(fragment, None)

    @property
    def unmerged_pushes(self) -> list[Push]:
        """Pushes to be sent again in a new session."""
        return list(self._unmerged.values())

    @property
    def awaits_merges(self) -> bool:
        """Whether the merge of some push is not adopted yet."""
        return bool(self._pushed_at)

    def due(self, fragment: int) -> bool:
        """Whether the fragment's snapshot is due after this very step.

        s ≥ o_p and (s - o_p) mod H = 0. A newcomer also answers for the due step that it missed, at its first
        own step; otherwise the others would wait for it until the next turn.
        """
        adoption = self._adoption
        base, step, every = adoption.fragments[fragment].base, adoption.now.step, adoption.config.every
        if base is None or fragment in self._pushed_at or adoption.pending_steps(fragment) == 0:
            return False
        offset = first_due(fragment, adoption.config)
        if step < offset:
            return False
        missed = fragment not in self._has_pushed and base.version <= (step - offset) // every
        return (step - offset) % every == 0 or missed

    def adoption_step(self, fragment: int) -> int | None:
        """The slot step after which the merge of the fragment's push is adopted; None: no push awaits one."""
        pushed = self._pushed_at.get(fragment)
        return None if pushed is None else pushed + self._adoption.config.overlap

    def may_adopt(self, fragment: int) -> bool:
        """Whether a broadcast of this fragment is adopted at this step boundary."""
        step = self.adoption_step(fragment)
        return step is None or self._adoption.now.step >= step

    @property
    def must_wait(self) -> bool:
        """Whether some merge must be adopted before the next step."""
        return any(self.may_adopt(fragment) for fragment in self._pushed_at)

    def reached_stop(self, stop: StopSpec, learners: int, tokens: int) -> bool:
        """Whether this slot, with ``tokens`` trained, has reached its own share of the stop."""
        if stop.kind == "steps":
            return self._adoption.now.step >= stop.limit
        return stop.kind == "tokens" and tokens >= -(-int(stop.limit) // learners)
