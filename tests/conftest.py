"""Makes the tables that several kinds of tests share importable (pytest imports tests by file), and
says where Hypothesis takes its examples from."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A run's outcome depends on the code alone: examples follow from each test's source. To look for
# new ones: make test PYTEST_ARGS=--hypothesis-profile=fresh
settings.register_profile("fixed", derandomize=True)
settings.register_profile("fresh")
settings.load_profile("fixed")
