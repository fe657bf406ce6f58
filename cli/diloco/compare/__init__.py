"""``diloco chaos``: the same job under the same faults, by this and by baselines, each as real processes.

``random_faults`` draws a schedule from a seed, ``measures`` says what the figures mean, ``report`` writes them: plain
code. ``plan`` settles what is compared, ``ours`` and ``baselines`` run an arm each, ``command`` runs them all and
keeps what is done.
"""
