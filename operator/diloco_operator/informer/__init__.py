"""What the operator knows of the cluster: the cache of objects, and what keeps it true.

``reflector`` lists and watches what jobs made, and nodes; ``job_events`` takes what kopf tells of DiLoCoJobs. May
import kube and the model. Nothing here decides anything about a job, and nothing here writes to the API server.
"""
