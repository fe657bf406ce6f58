"""Durable objects: the store's contract, its two implementations, and what the syncer keeps in it.

``base`` is the contract, ``directory`` and ``bucket`` implement it, ``open`` chooses; ``epochs`` says which of several
syncers the store belongs to. ``records``, ``documents`` and ``tape`` are file formats; ``checkpoint`` writes a job's
objects and ``restore`` finds what fits together. All calls block. Never here: event loops, and decisions about the job.
"""
