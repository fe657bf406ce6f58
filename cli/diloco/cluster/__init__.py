"""Commands for jobs in Kubernetes clusters: apply, status, logs, events, change, fetch.

``client`` is the way to a cluster, ``port_forward`` the way to a pod, ``render`` what a person sees.
Nothing here runs a job's processes; what the operator does is never done from here.
"""
