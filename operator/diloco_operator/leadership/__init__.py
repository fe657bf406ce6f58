"""Which of several operators acts: the election, by a Lease of the API server.

May import ``kube`` and ``names``. What an operator does as the leader is not decided here.
"""
