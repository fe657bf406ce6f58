"""Commands for jobs on bare machines: ``diloco syncer serve`` and ``diloco learner join``.

Each starts and keeps processes of this machine through ``local`` and ``processes``. No cluster is asked.
"""
