"""The merged model as safetensors files: one that is made while it is sent, or several that are written to a place.

``model_file`` puts parameters, which lie here by fragment, in the order of a file; ``shards`` names the files of a
model; ``model_output`` writes them to ``spec.output.uri``, and ``read_output`` reads them back. Never here: decisions
about the job, pages.
"""
