"""The same job under the same faults, by this and by baselines, each as real processes (``bench/chaos.py``).

``measures`` says what the figures mean, ``report`` writes them: plain code. ``plan`` settles what is compared, ``ours``
and ``baselines`` run an arm each, ``command`` runs them all and keeps what is done.
"""
