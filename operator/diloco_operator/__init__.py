"""The operator: a kopf operator that makes DiLoCoJobs true on one cluster.

``app`` puts the parts together; ``informer`` says what there is, ``plan`` decides, ``reconcile`` carries out. May
import the protocol; never the syncer or the worker.
"""
