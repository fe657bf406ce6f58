"""Makes what is in bench/ importable, as it is for a script there."""

from __future__ import annotations

import sys

from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))
