"""The syncer's decisions: events and the time go in, actions come out. Start with ``core.py``.

May import: ``diloco_protocol`` (vocabulary, spec, arrays) and itself. Never here: sockets, threads, files, a clock,
gRPC or protobuf; the simulator in tests/unit/syncer/core drives this same code in virtual time.
"""
