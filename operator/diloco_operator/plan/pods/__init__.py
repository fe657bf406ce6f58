"""What a turn decides about single pods: losses, restarts for a changed template, lost nodes.

May import: what the plan may. Must never be here: what is about the job as a whole (lifecycle, conditions, status).
"""
