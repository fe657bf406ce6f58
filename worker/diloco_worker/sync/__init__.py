"""What the training thread does at a step boundary: adopt, push, report, drain, hand the optimizer's state over.

``synchronizer`` is where to begin. May import ``net``, ``data`` and ``core``; must never wait for the network but
where its docstring says so, and starts no thread of its own but the one that writes a slot's checkpoint.
"""
