"""What a program in a pod says as it ends well, for who looks at the pod."""

MAKES_ROOM = "the job goes on: this process ends, so that a new one can take part"
"""Of a learner that was idle at the job's end (complete, suspended), or whose job was drained."""
