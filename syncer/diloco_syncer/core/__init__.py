"""The syncer's decisions: events and the time go in, actions come out. Start with ``core.py``.

A stack: ``shards`` says who has which fragment, ``books`` know, ``state`` holds all books of one job, ``recovery``,
``members`` and ``merging`` decide by the books, ``phases`` decides the job's life, and ``core`` connects them. A
contract in pyproject.toml has the order.

May import: ``diloco_protocol`` (vocabulary, spec, arrays) and itself. Never here: sockets, threads, files, a clock,
gRPC or protobuf; tests/syncer_simulation drives this same code in virtual time.
"""
