"""The background thread: everything between the training thread and the syncer.

``client`` is what the training thread calls, ``inbox`` what it reads; ``connection`` joins and handles messages,
``session`` is the control stream, ``transfers`` the bulk data beside it. May import ``core`` and ``fragments``;
must never touch a model's parameters.
"""
