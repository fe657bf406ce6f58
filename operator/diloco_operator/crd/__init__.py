"""The custom resource definition of DiLoCoJob, made from the models: its schema, and its rules in CEL.

May import: status_models, kube.kinds and the protocol's spec. Must never be here: anything that runs in the operator.
"""
