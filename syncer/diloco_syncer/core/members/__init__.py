"""Who takes part: admission and losses, who uploads version 0, whose optimizer state a newcomer gets, and what is said
of a learner whose loop makes no step.

May import: ``recovery`` and what is below it. Never here: when a fragment is merged (``merging``), I/O or a clock.
"""
