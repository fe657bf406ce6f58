"""The goodput of fleets that fail.

``fleet``      learners that stop and go on; exact between events, no learner's steps in it
``pace``       learners of different speeds who wait for a quorum, and compute that comes for a part of a run
``published``  what the paper reports, and the parameters that fit it, each with where it is from
``defaults``   the same as the simulators take them
``rows``       the published tables beside ours, and the tables for a fleet of one's own
``core_fleet`` the real syncer core and adoption rule under the same failures, in virtual time
``core_rows``  both simulators, cell by cell
"""
