"""The API server: requests to it, the kinds of objects there, and what the operator must be allowed to do.

``client`` is the one Kubernetes client of the operator, the command line and the benchmarks; ``api`` has the
operator's requests, off its event loop. May import settings, names and the model; decides nothing about jobs.
"""
