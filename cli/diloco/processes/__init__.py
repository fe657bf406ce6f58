"""Processes of one machine and their files: which there are, how they start, when they start again.

``supervisor`` decides and does no I/O; ``launch`` starts, ``child_guard`` ends children with their parent,
``watchdog`` finds a syncer that hangs, ``workdir`` owns the run's files. Never imports a command.
"""
