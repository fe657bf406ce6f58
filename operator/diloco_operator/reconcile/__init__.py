"""One turn for one job: what is known of it goes to the plan, and what the plan wants is carried out.

Here is all that writes to the API server and calls syncers. May import the informer, the plan and kube; what shall be
is decided in ``plan``, never here.
"""
