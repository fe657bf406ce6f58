"""The goodput of fleets that fail: the paper's table, and the real core under the same failures (``bench/goodput.py``).

``published``  what the paper reports, and the parameters that fit it, each with where it is from
``pace``       learners of different speeds who wait for a quorum, and compute that comes for a part of a run
``rows``       the published tables beside ours
``core_fleet`` the real syncer core and adoption rule under the same failures, in virtual time
``core_rows``  both simulators, cell by cell
``tables``     rows as text
``plots``      rows as plots

The simulator without a core is ``lab.fleet``.
"""
