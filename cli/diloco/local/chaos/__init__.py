"""Faults on purpose: what ``--chaos`` may say, when each fault is due, how it is done, what it cost.

``schedule``, ``random_faults`` and ``fault_report`` are decisions without I/O; ``injector`` and ``proxy``
carry them out. ``draw`` makes the schedule that ``diloco chaos`` is asked for.
"""
