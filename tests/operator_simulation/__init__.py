"""Several simulated clusters in which the real operator runs: reconciler, applier, poller, queue and plan.

``virtual_time.py`` is an event loop whose time passes as fast as the machine allows. ``api_server.py`` is one
cluster's API server, and a client of it that loses answers. ``kubernetes.py`` has the controllers, nodes and
kubelets, ``programs.py`` the syncer and the learners as data. ``world.py`` puts them together, holds every
act of an operator to what must always be true. ``faults.py`` has the faults, and ``random_faults.py`` runs worlds with
some of them by chance.

What is simulated is what the product does not own. Everything of the operator but its streams, sockets and
files is the product's own code.
"""
