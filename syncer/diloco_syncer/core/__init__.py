"""The syncer's decisions: events and the time go in, actions come out. Start with ``core.py``.

May import: ``diloco_protocol`` (vocabulary, spec, arrays) and itself. Never here: sockets, threads, files, a clock,
gRPC or protobuf; tests/syncer_simulation drives this same code in virtual time.
"""
