"""What all programs of a job agree on; each sub-package says what it holds.

Imports go down: documents, bandwidth, wire, security, spec, arrays, common, vocabulary (pyproject.toml).
Nothing here imports the syncer, the worker, the operator or the command line."""
