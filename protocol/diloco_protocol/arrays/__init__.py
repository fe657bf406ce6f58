"""The model as flat arrays: how tensors are cut into fragments, and how their values are encoded for the wire.

Bit-exact: the same input gives the same bytes on every machine and with any number of threads. numpy and numba
only; no torch, no network, no files but the cache of compiled kernels."""
