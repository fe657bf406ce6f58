"""From pushes to versions: which pushes count (``push_checks`` lists all checks in order), and what follows from one
that counts: rounds that open and close, merges that start and end (``aggregation``), and what is lost with a shard
(``lost_shards``).

May import: ``recovery`` and what is below it. Never here: the arithmetic of a merge (``numerics``), I/O or a clock.
"""
