"""A whole job in virtual time: the product's own decisions and arithmetic, and what lies between them simulated.

``world``      the job: events, messages, processes that die and come back
``learner``    one learner's process at its step boundaries: the real adoption rule
``broadcasts`` versions on their way to the learners
``links``      latency and rate of each learner's link
``timeline``   virtual time
``parts``      what a world is given: what a step does, and what the syncer keeps
``values``     learners and syncer with real parameters: codec, error feedback, merge, outer optimizer

Without parameters a learner costs nothing but its messages, and a world may have a thousand of them. Never here:
sockets, threads, the time of day. torch is loaded by ``values`` alone, when a world with parameters is made.
"""
