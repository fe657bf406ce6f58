"""What the paper reports (arXiv 2604.21428), and the parameters that fit it, each with where it is from.

The figures are the paper's as several readers report them. It names the kinds of distribution and no number of them:
parameters that are marked "fit" were chosen here so that the simulator meets the table, and say no more than that.
Those of every fleet are in ``lab.fleet.parameters``.
"""

from __future__ import annotations

from lab.fleet.parameters import Parameter

# Table 1: goodput (%) by chips, at one failure per chip and year.
CHIPS: tuple[int, ...] = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID = (72, 57, 38, 27, 18)  # data-parallel: any failure stops all until all is there again
ELASTIC = (88, 80, 69, 58, 40)  # data-parallel that goes on without what failed
DECOUPLED: dict[int, tuple[int, ...]] = {  # by learners
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
UPTIME_FROM = 4  # learners: uptime is about 100 % at every size from there on

# Eight learners of unequal speed, the slow ones 18 % behind: goodput (%).
UNEVEN = {"K = 8": 84, "K = 1": 100, "K = 1, grace": 100}

# Compute that comes for a part of the run, as a share of the base's: time of the whole run, as a share of the base's.
SCAVENGED: tuple[float, ...] = (0.25, 0.5, 1.0, 3.0)
SCAVENGED_DECOUPLED = (0.90, 0.83, 0.75, 0.62)
SCAVENGED_PARALLEL = (1.07, 1.09, 1.02, 0.80)  # readers disagree on the last


SLICE = Parameter(256, "fit: chips that go when one of them fails; a slice of 16 x 16")

# Learners of unequal speed: one half slower. Eight learners, 18 % and a variance of 10 % are published; how many are
# slow, and that the variance is that of single steps, is not.
UNEVEN_LEARNERS = 8
UNEVEN_SLOW = Parameter(4, "not published: one half")
UNEVEN_BEHIND = Parameter(0.18, "published: the slowest are 18 % behind")
UNEVEN_VARIATION = Parameter(0.10, "published as a variance of 10 %; taken as the standard deviation of single steps")
UNEVEN_OVERLAP = Parameter(0, "fit: steps that an exchange overlaps there; at 2 the simulator gives 91 for K = 8")
GRACE_FACTOR = Parameter(0.9, "algorithm.md section 4: the share of an exchange's slack that the window takes")

SCAVENGED_STEP = Parameter(10.5, "fit, with SCAVENGED_EVERY: two parameters to four published values")
SCAVENGED_EVERY = Parameter(
    7.1, "fit: seconds between comings and goings, where the extra compute is as large as the base"
)
