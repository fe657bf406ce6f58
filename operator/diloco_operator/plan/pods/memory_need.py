"""What memory a program needs that ran out of it, in words."""

from __future__ import annotations

from diloco_operator import names
from diloco_operator.plan.view import View
from diloco_protocol.common.format_units import size_text
from diloco_protocol.resources import even_sizes, needs, plan_hint, shard_memory, syncer_pod_memory


def memory_need_text(view: View, role: str) -> str:
    """What a pod of this role needs. The size of the model is the one that the syncer told last: it does not answer
    when it ran out of memory itself."""
    spec, (parameters, fragments) = view.job.spec, view.memory.model_size
    if not parameters:
        return plan_hint(spec)
    sizes = even_sizes(parameters, max(1, fragments))
    if role == "syncer":
        return f"The syncer of this model needs up to {size_text(syncer_pod_memory(spec, sizes))}"
    if role == names.SHARD:
        return f"A shard of this model needs up to {size_text(shard_memory(spec, sizes, spec.syncer.shards))}"
    return f"A learner of this model needs at least {size_text(needs(spec, sizes).learner_memory)}"
