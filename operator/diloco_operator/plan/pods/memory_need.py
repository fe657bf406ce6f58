"""What memory a program needs that ran out of it, in words."""

from __future__ import annotations

from diloco_operator.plan.view import View
from diloco_protocol.common.format_units import size_text
from diloco_protocol.resources import even_sizes, needs, plan_hint


def memory_need_text(view: View, is_syncer: bool) -> str:
    """What the syncer, or a learner, of this job needs. The size of the model is the one that the syncer told last: it
    does not answer when it ran out of memory itself."""
    parameters, fragments = view.memory.model_size
    if not parameters:
        return plan_hint(view.job.spec)
    needed = needs(view.job.spec, even_sizes(parameters, max(1, fragments)))
    if is_syncer:
        return f"The syncer of this model needs up to {size_text(needed.syncer_memory)}"
    return f"A learner of this model needs at least {size_text(needed.learner_memory)}"
