"""Simulations: what a fleet, a link or a job would do, without the machines.

``failures``   when chips fail and how long repairs take, as functions of a random generator
``goodput/``   what share of its time a fleet that fails trains
``bandwidth``  what links need, and how much of its time a learner computes
``job/``       a whole job in virtual time: the real syncer core, adoption rule, merge and codec
``commands``   the words of ``diloco simulate``
``tables``     their rows as text
``drawings``   and as plots
``cells``      results that take long, kept by a digest of what made them
``progress``   how far a long computation is

What decides is free of clocks, files and sockets, and takes its chance from a generator that it is given.
"""
