"""``diloco simulate``: what share of its time a fleet that fails would train, without the machines.

``failures``   when chips fail and how long repairs take, as functions of a random generator
``fleet``      learners that stop and go on; exact between events, no learner's steps in it
``parameters`` what a fleet is like where the command line is silent, each value with where it is from
``advice``     which number of learners is enough, what spare slices and faster recovery buy
``commands``   the word of ``diloco simulate``
``tables``     its rows as text

What decides is free of clocks, files and sockets, and takes its chance from a generator that it is given. The paper's
own table, and the real syncer core under the same failures, are in bench/lab/goodput.
"""
