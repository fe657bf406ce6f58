"""The operator's program: ``python -m diloco_operator``.

Exit codes: 0 after SIGTERM or SIGINT, 1 after an error that should not be, 2 if settings are
wrong or there is no way to the API server.
"""

from __future__ import annotations

import asyncio
import os
import sys

from diloco_operator import logs
from diloco_operator.app import run
from diloco_operator.kube.client import configuration
from diloco_operator.kube.errors import ConfigError
from diloco_operator.settings import SettingsError, load
from diloco_protocol.common import bounded_json
from diloco_protocol.common.process import raise_file_limit


def main() -> int:
    """Run until told to stop; the exit code."""
    bounded_json.install()
    try:
        settings = load(sys.argv[1:], os.environ)
        logs.configure(settings.log_format, settings.log_level)
        config = configuration()
    except (SettingsError, ConfigError) as error:
        print(f"diloco_operator: {error}", file=sys.stderr)
        return 2
    raise_file_limit()
    return asyncio.run(run(settings, config))


if __name__ == "__main__":
    sys.exit(main())
