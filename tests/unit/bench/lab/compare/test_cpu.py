"""CPU seconds of a process and its descendants."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from lab.compare.cpu import CpuMeter, descendants, read_processes
from patience import wait_until


def test_descendants_are_found_over_generations() -> None:
    table = {1: (0, 0.0), 2: (1, 0.0), 3: (2, 0.0), 4: (1, 0.0), 5: (4, 0.0), 9: (8, 0.0)}
    assert descendants(1, table) == {1, 2, 3, 4, 5}
    assert descendants(4, table) == {4, 5}
    assert descendants(77, table) == {77}


def test_what_a_child_computes_counts() -> None:
    burn = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-S", "-c", burn], stdin=subprocess.PIPE)
    try:
        meter = CpuMeter(os.getpid())
        meter.sample()
        begun = time.time()
        # The kernel rounds user and system time each down to a tick of 10 ms: 0.3 s can stay 0.29 for ever.
        wait_until(lambda: read_processes().get(child.pid, (0, 0.0))[1] >= 0.28, "0.3 s of work", child)
        time.sleep(0.02)
        meter.sample()
        share = meter.share(begun - 1, time.time(), 1)
        assert 0.25 / (time.time() - begun + 1) < share, "the child's 0.3 s are in it"
        assert meter.share(begun + 1000, begun + 2000, 1) == 0.0
    finally:
        child.communicate(b"\n", timeout=10)
