"""The command ``diloco``: one file a group of commands, each importing what it needs when it runs.

``main`` holds the commands of one machine; ``cluster``, ``machines`` and ``certs`` add their own. This package
may import every other one, torch never at the top of a module: help, validate and status answer at once.
Decisions that need no I/O (``local.chaos.schedule``, ``processes.supervisor``) stay free of it.
"""
