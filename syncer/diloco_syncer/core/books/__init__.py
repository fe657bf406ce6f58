"""What is known of a job, one book for each subject. A book is a noun: it changes only itself, and decides nothing.

``slots``            who holds which slot, and the regions that are lost
``leases``           which block of the data is whose, and how far it was trained
``rounds``           the versions, the open rounds, and when each may be merged
``exchanges``        how many rounds may be open
``ledger``           what became of every token
``norm_gate``        how large pushes usually are
``lineage``          the epochs from which the store went on for good
``clock``            the job's elapsed seconds and its uptime
``scores``           the losses that evaluators reported
``recent_refusals``  the places that were refused lately
``deterministic``    all rules that differ in deterministic mode

A book's head has its theory and an example: read these first, and then ``members`` and ``merging``, which decide
by the books. ``state.py`` holds all books of one job. May import: other books and the protocol package. Never here:
an event or an action of the core. A contract in pyproject.toml checks that.
"""
