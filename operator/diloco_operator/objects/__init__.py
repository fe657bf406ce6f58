"""The manifests of a job's objects, for server-side apply: a job goes in, dicts come out.

May import: job, names, model, the table ``kube/kinds.py`` and the protocol package. Must never be here: the
cluster's state (the plan decides by it), and requests.
"""
