"""What one learner's work counts for, beside that of the others: weights in a merge, tokens and steps toward the stop.

Theory of operation. Steps and tokens are what learners say. One that has a wrong ``tokens=`` in its loop, or lies,
would take a merge for itself, end the job, or move the learning rate of all. So what it says counts in proportion to
what is seen, and honest learners notice nothing of it:

* *Tokens per step* count up to ``MOST`` times those of the learner with the second most, each by the batch that the job
  gives its region. A single learner can so neither raise nor lower what the others' tokens count for, where there are
  two others; where there is one other, the lower of both decides. In a merge they count up to ``MOST`` times the
  learner's own mean, too.
* *Sequences per step* that are marked as read count up to ``MOST`` times the most of another learner, or its batch.
* *Steps of a push* count up to sync.staleness.maxSteps, or ``MOST`` times those of the second longest of the merge.
* *Steps toward the stop* count while few of them are in no merge (``Slot.advance``), and so do their tokens. Of a
  job's several learners the first that reports may be the only one for a while: its tokens count once they are merged.

Example. Three learners of one batch tell of 16, 16 and 4000 tokens a step. The third one's count as 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from math import inf
from typing import Literal, NamedTuple

from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.core.books.slots import Slot

StopKind = Literal["steps", "tokens", "seconds"]
Stop = tuple[StopKind, float]  # what is counted, and how much of it
MOST = 4.0


class Work(NamedTuple):
    """Tokens in so many steps, of a learner whose batch has so many sequences a step."""

    tokens: int
    steps: int
    batch: int = 1
    usual: float = inf  # tokens per step of its whole tenure; infinite: not known


def work_of(header: PushHeader, batch: int) -> Work:
    """What a push carries."""
    steps, tokens = header.report.trained_steps, header.report.trained_tokens
    return Work(header.tokens, header.steps, batch, usual=tokens / steps if steps else inf)


def bound_tokens(works: Sequence[Work]) -> list[float]:
    """Of each the tokens that count; those that need no bound are as they were."""
    rates = nlargest(2, (work.tokens / (work.steps * work.batch) for work in works if work.steps and work.tokens))
    most = MOST * rates[-1] if rates else 0.0
    return [min(work.tokens, most * work.batch * work.steps, MOST * work.usual * work.steps) for work in works]


def most_beside(others: Sequence[Work]) -> float:
    """Beside the others' sequences in their steps, how many a step can have for each sequence of its batch. The job's
    own batch is never too much; where nobody else has read, there is no bound."""
    rates = [work.tokens / (work.steps * work.batch) for work in others if work.steps and work.tokens]
    return MOST * max(1.0, *rates) if rates else inf


def weigh_pushes(kind: str, works: Sequence[Work], most_ahead: int) -> list[float]:
    """The weights of a merge's pushes, by as much of their work as counts."""
    steps = bound_steps([work.steps for work in works], most_ahead)
    counted = [
        work._replace(tokens=work.tokens * count // work.steps if count < work.steps else work.tokens, steps=count)
        for work, count in zip(works, steps, strict=True)
    ]
    return normalised_weights(kind, bound_tokens(counted), steps)


def normalised_weights(kind: str, tokens: Sequence[float], steps: Sequence[int]) -> list[float]:
    """How much each push counts in a merge (algorithm.md section 5): one weight per push, their sum 1.

    ``tokens-quality``: tokens · (tokens / steps), quantity times quality (the paper's); ``tokens``: tokens;
    ``uniform``: the same for all. A push of zero steps weighs nothing. Raises ValueError for an unknown kind or if
    nothing weighs anything.
    """
    if kind == "tokens-quality":
        raw = [t * (t / s) if s else 0.0 for t, s in zip(tokens, steps, strict=True)]
    elif kind == "tokens":
        raw = [float(t) if s else 0.0 for t, s in zip(tokens, steps, strict=True)]
    elif kind == "uniform":
        raw = [1.0 if s else 0.0 for s in steps]
    else:
        raise ValueError(f"sync.merge.weights: {kind!r} is none of tokens-quality, tokens, uniform")
    total = sum(raw)
    if not total > 0:
        raise ValueError("no push of the merge carries a step")
    return [value / total for value in raw]


def bound_steps(steps: Sequence[int], most_ahead: int) -> list[int]:
    """Of each push of a merge the steps that count for its weight."""
    most = max(most_ahead, int(MOST * nlargest(2, steps)[-1]))
    return [min(count, most) for count in steps]


def claimed_amount(kind: StopKind, slots: Sequence[Slot], ledger: Ledger, elapsed: float) -> float:
    """What the stop's limit would be compared with if all that learners say were believed, which is never less than
    what counts: the greatest slot step, tokens of all learners, or ``elapsed`` seconds since the first step."""
    if kind == "steps":
        return max(slot.step for slot in slots)
    return ledger.total_trained() if kind == "tokens" else elapsed


def reached_amount(
    kind: StopKind, slots: Sequence[Slot], ledger: Ledger, elapsed: float, batches: Sequence[int]
) -> float:
    """What counts toward the stop: the greatest slot step, tokens of all learners, or seconds. ``batches``: of each
    slot's learner, in sequences."""
    if kind == "seconds":
        return elapsed
    if kind == "steps":
        return max(slot.counted_step for slot in slots)
    works = []
    for slot, batch in zip(slots, batches, strict=True):
        steps, tokens = ledger.steps(slot.index), ledger.trained(slot.index)
        counted = max(0, steps - slot.uncounted_steps)
        works.append(Work(tokens * counted // steps if counted < steps else tokens, counted, batch))
    if sum(bool(work.steps and work.tokens) for work in works) == 1 < sum(not slot.retired for slot in slots):
        # There is nobody to compare it with, and there may be: what is merged counts.
        return min(sum(ledger.merged(slot.index, p) for slot in slots) for p in range(ledger.fragments))
    return sum(bound_tokens(works))
