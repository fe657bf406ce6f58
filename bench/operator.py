"""The operator with many jobs on a real API server: time of a reconcile, memory, requests.

A program's folder comes first on its import path, so every program here finds this file when
it (or a library) asks for the standard library's `operator`. It then gets that one.
"""

import os
import sys

if __name__ == "__main__":
    import operator_load

    operator_load.main()
else:
    _here = os.path.dirname(os.path.abspath(__file__))
    _path = list(sys.path)
    sys.path[:] = [entry for entry in _path if os.path.abspath(entry) != _here]
    del sys.modules[__name__]
    try:
        import operator  # noqa: F401  (the import system hands out what is in sys.modules now)
    finally:
        sys.path[:] = _path
