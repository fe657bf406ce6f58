"""Makes the helper modules beside the tests importable (pytest imports tests by file, without a package)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
