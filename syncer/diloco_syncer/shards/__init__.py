"""Shards: processes that own the bytes of some fragments, beside the syncer, which owns the job.

Theory of operation. The syncer keeps the core, and with it sessions, control, state, tape and pages. A shard has
everything that touches the bytes of its fragments: the uploads of pushes, their norms, merges, outer steps, records,
offers, and the downloads of versions. The two say to each other (``messages``) what the core hears and decides. The
core's fragments are dealt to shards by bytes; the store, which all use, does not know how many they are.

``shard`` is what a shard does, ``process`` its process, ``coordinator`` the syncer's side of all of them,
``supervisor`` starts their processes, and ``stream`` carries the messages.

What is still wrong with it: the syncer reads all records once at its start, to verify them, and shards read them again.
"""
