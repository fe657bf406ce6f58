"""Audits a run from its store: what its tape, records and books say, and whether they agree. Nothing here writes.

``store_audit``  reads a store and says what holds
``tape_audit``   the tape, line by line: a decider without files
"""
