"""The syncer's decisions: events and the time go in, actions come out. Start with ``core.py``.

May import: ``diloco_protocol`` (vocabulary, spec, arrays) and itself. Never here: sockets, threads, files, a clock,
gRPC or protobuf; the simulation in tests/syncer_world.py drives this same code in virtual time.
"""
