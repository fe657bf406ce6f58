"""The runner of one job's processes on this machine, in parts that change for different reasons.

``runner`` makes the parts, starts the job and takes everything down. ``job_follower`` reads the syncer's status and
does what follows from it. ``process_keepers`` starts processes and waits for them; ``process_ends`` does what the
supervisor says about an end. ``syncer_health`` says when a syncer that runs is of no use any more. ``run_end`` decides
how the run ends. What all of them have at hand is in ``run_part``; the others a part receives by its constructor, and
it never imports ``runner``.
"""
