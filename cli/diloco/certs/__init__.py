"""``diloco certs``: the job's own certificate authority, as files and as Kubernetes Secrets.

``commands`` has words and arguments, ``files`` what is written. Keys are never printed.
"""
