"""From pushes to versions: which pushes count (``push_checks`` lists all checks in order), when a fragment is merged
(``rounds``), how both meet the slots (``aggregation``), and what became of every token (``ledger``).

Never here: the arithmetic of a merge (``numerics``), I/O or a clock.
"""
