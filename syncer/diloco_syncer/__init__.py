"""The syncer of one job: it collects learners' outer gradients, merges them and broadcasts the result.

``__main__`` (arguments and exit codes) calls ``service`` (one life: ports, servers, address file). ``startup``
builds from the store what ``syncer`` connects. Below: ``server`` (what callers reach), ``output`` (the model as
files), ``runtime`` (drives the core), ``store`` (durable objects), ``numerics`` (arrays in, arrays out), ``core``
(decisions). Imports go down this list only. Never here: torch, Kubernetes, worker, operator.
"""
