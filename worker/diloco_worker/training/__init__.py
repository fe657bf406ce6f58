"""The built-in programs: trainer and evaluator, the job's model and optimizer, and export.

They use the library as a user's own program would (``Learner``, ``Observer``), and nothing of ``net`` or ``sync``.
"""
