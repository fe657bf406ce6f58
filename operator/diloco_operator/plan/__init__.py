"""The pure core of the operator: what is observed of one job goes in, what to do about it comes out.

May import: objects, job, names, status_models, model, and the protocol package. Must never be here:
requests, clocks, files, threads, kopf or the Kubernetes client. Time is ``Observed.now``.

Begin with ``planning.py``. One word has one meaning: a pod is *gone* when its object is not there any more,
*stuck* when it is still Terminating after its grace period, *silent* when it is ready and the syncer, which
answers, does not hear it. A node is *lost* when it is NotReady or missing; a region is *lost* when no learner
of it is heard that was heard before.
"""
