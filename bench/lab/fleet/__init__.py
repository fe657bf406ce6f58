"""What share of its time a fleet that fails would train, without the machines (``bench/goodput.py``).

``simulator``  learners that stop and go on; exact between events, no learner's steps in it
``repairs``    how long repairs take
``parameters`` what a fleet is like where the command line is silent, each value with where it is from
``advice``     which number of learners is enough, what spare slices and faster recovery buy
``arguments``  the values of the options
``tables``     rows as text

What decides is free of clocks, files and sockets, and takes its chance from a generator that it is given. The paper's
own table, and the real syncer core under the same failures, are in ``lab.goodput``.
"""
