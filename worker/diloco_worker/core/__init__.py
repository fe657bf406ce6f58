"""The learner's decisions: no I/O, clock, thread, tensor or socket.

``adoption`` decides what becomes of a learner's work when a broadcast comes, ``leases`` which sequence is trained
next. Beside them stand two plain values, ``syncer_settings`` and ``connection_status``. Nothing of this package but
``settings`` may be imported here, and never torch or grpc.
"""
