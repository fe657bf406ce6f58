"""Who takes part: slots and their incarnations, admission, data leases, reports, who uploads version 0, and whose
optimizer state a newcomer gets.

May import: ``recovery`` and the state of the core. Never here: when a fragment is merged (``merging``), I/O or a clock.
"""
