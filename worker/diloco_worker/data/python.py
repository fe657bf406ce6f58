"""Data of the user's own: ``module:function(training.data, held_out)`` returns a map-style data set.

The module is looked for in the job file's directory first, then wherever Python looks. What it returns needs
``len(data)`` and ``data[i]``; with the built-in trainer an item is a dict of tensors that the model takes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from diloco_protocol.spec.training import DataSpec
from diloco_worker.errors import job_error

FIELD = "spec.training.data.function"


def load(data: DataSpec, held_out: bool, directory: Path) -> Any:
    """Call the function. Raises JobError if it is not there, or returns no map-style data set;
    what the function itself raises passes through, with its traceback."""
    assert data.function is not None  # a rule of the job spec
    module_name, _, function_name = data.function.partition(":")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name == e.name or module_name.startswith(e.name + ".")):
            raise  # the module is there, and imports something that is not
        raise job_error(
            FIELD, data.function, f"no module {e.name}, neither in {directory} nor where Python looks"
        ) from e
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", module_name)
        raise job_error(FIELD, data.function, f"{where} has no function {function_name}")
    found = function(data, held_out)
    if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise job_error(FIELD, data.function, f"must return a data set with len() and [i], not {type(found).__name__}")
    return found
