"""How much each push counts in a merge (algorithm.md section 5)."""

from __future__ import annotations

from collections.abc import Sequence


def weights(kind: str, tokens: Sequence[int], steps: Sequence[int]) -> list[float]:
    """Normalised weights, one per push.

    ``tokens-quality``: tokens · (tokens / steps), quantity times quality (the
    paper's); ``tokens``: tokens; ``uniform``: the same for all. A push of zero
    steps weighs nothing. Raises ValueError for an unknown kind or if nothing
    weighs anything.
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
