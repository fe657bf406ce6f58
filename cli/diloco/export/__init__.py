"""``diloco export``: the trained model, from a workdir or from a syncer that runs, as a directory.

The only part of the command line that loads torch, and only when the command runs.
"""
